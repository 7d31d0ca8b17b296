"""Conversations of requests, and hashes that find equal ones without tokenising. Pure."""

import json
from dataclasses import dataclass
from hashlib import blake2b

from shoal.types import Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation of a request: messages, and the other inputs of the template."""

    messages: tuple[Message, ...]
    tools: str = ""  # JSON array; empty without tools
    template: str = ""  # JSON object of further template arguments; empty without any
    begun: str = ""
    """Beginning of the answer as the client wrote it; the model continues it."""

    @property
    def answered(self) -> "Conversation":
        """Conversation with the beginning of the answer as its last message."""
        return Conversation((*self.messages, Message(Role.ASSISTANT, self.begun)), self.tools, self.template)


def chain(conversation: Conversation) -> list[bytes]:
    """Hashes of all prefixes of the messages; the first covers only tools and template arguments."""
    hashes = [_hash(conversation.tools.encode(), conversation.template.encode())]
    for message in conversation.messages:
        hashes.append(link(hashes[-1], message))
    return hashes


def text_size(messages: tuple[Message, ...], tools: str, *, thoughts: bool = True) -> int:
    """Characters of the messages and tools; templates leave out earlier `thoughts`."""
    calls = sum(len(call.id + call.name + call.arguments) for message in messages for call in message.tool_calls)
    texts = sum(len(one.content + one.tool_call_id) + thoughts * len(one.reasoning) for one in messages)
    return len(tools) + calls + texts


def session_name(token: str) -> str:
    """Name of a session in the ids of its answers; it does not tell the token."""
    return blake2b(token.encode(), digest_size=8).hexdigest()


def minted_id(session: str, generation_id: int, index: int) -> str:
    """Id of a generation's tool call: nine letters and digits, as the strictest templates demand."""
    number = int.from_bytes(_hash(session.encode(), b"%d" % generation_id, b"%d" % index), "big")
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(letters[number // 36**place % 36] for place in range(9))


def link(before: bytes, message: Message) -> bytes:
    """Hash of a conversation extended by a message."""
    return _hash(before, message.role.value.encode(), *_view(message))


def _view(message: Message) -> tuple[bytes, ...]:
    """Parts in which equal messages must agree: all, but for an assistant only the parts that clients leave unchanged.

    Clients strip answers, reformat arguments, replace ids and drop reasoning. These edits do not change the sampled
    tokens.
    """
    if message.role is not Role.ASSISTANT:
        return (message.content.encode(), message.tool_call_id.encode())
    calls = (part for call in message.tool_calls for part in (call.name.encode(), _arguments(call)))
    return (" ".join(message.content.split()).encode(), *calls)


def _arguments(call: ToolCall) -> bytes:
    try:
        return json.dumps(json.loads(call.arguments or "{}"), sort_keys=True).encode()
    except (ValueError, RecursionError):
        return call.arguments.encode()


def _hash(*parts: bytes) -> bytes:
    """Hash of the length-prefixed parts."""
    return blake2b(b"".join([b"%d:%b" % (len(part), part) for part in parts]), digest_size=16).digest()
