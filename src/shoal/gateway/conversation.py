"""Conversations of requests, and the hashes by which equal ones are found without tokenising. Pure."""

import json
from dataclasses import dataclass
from hashlib import blake2b

from shoal.types import Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation of a request: messages, and the other inputs of the template."""

    messages: tuple[Message, ...]
    tools: str = ""  # JSON array; empty when there are none
    template: str = ""  # JSON object of further template arguments; empty when there are none
    begun: str = ""
    """Beginning of the answer as the client wrote it; the answer goes on from there."""

    @property
    def answered(self) -> "Conversation":
        """Conversation that ends in the beginning of the answer."""
        return Conversation((*self.messages, Message(Role.ASSISTANT, self.begun)), self.tools, self.template)


def chain(conversation: Conversation) -> list[bytes]:
    """Hashes of the first i messages, for every i; tools and template arguments come before the first."""
    hashes = [_hash(conversation.tools.encode(), conversation.template.encode())]
    for message in conversation.messages:
        hashes.append(link(hashes[-1], message))
    return hashes


def minted_id(session: str, generation_id: int, index: int) -> str:
    """Id of a generation's tool call: nine letters and digits, as the strictest templates demand."""
    number = int.from_bytes(_hash(session.encode(), b"%d" % generation_id, b"%d" % index), "big")
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(letters[number // 36**place % 36] for place in range(9))


def link(before: bytes, message: Message) -> bytes:
    """Hash of a conversation that goes on with a message."""
    return _hash(before, message.role.value.encode(), *_view(message))


def _view(message: Message) -> tuple[bytes, ...]:
    """Parts in which two equal messages must agree: all, but for an assistant only the parts that clients leave alone.

    Clients strip answers, reformat arguments, replace ids and drop reasoning; none of these edits changes the sampled
    tokens.
    """
    if message.role is not Role.ASSISTANT:
        return (message.content.encode(), message.tool_call_id.encode())
    calls = (part for call in message.tool_calls for part in (call.name.encode(), _arguments(call)))
    return (" ".join(message.content.split()).encode(), *calls)


def _arguments(call: ToolCall) -> bytes:
    try:
        return json.dumps(json.loads(call.arguments or "{}"), sort_keys=True).encode()
    except ValueError:
        return call.arguments.encode()


def _hash(*parts: bytes) -> bytes:
    """Hash of the parts and their ends."""
    return blake2b(b"".join([b"%d:%b" % (len(part), part) for part in parts]), digest_size=16).digest()
