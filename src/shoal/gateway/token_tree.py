"""The token ledger of one conversation: what an engine had in context, and what it drew from there. Pure.

A client speaks in messages; an engine must be given tokens. Rendering the whole conversation anew for each request
would re-tokenise what was drawn, and training would then reinforce tokens that the policy never chose. The ledger finds
how much of a request is a conversation it already has the tokens of, and asks to have only the rest rendered:

    attachment = ledger.attach(conversation)          which generation is extended, and by which messages
    rendered   = bridge or full rendering             the caller's, in a thread: see `shoal.render`
    call       = ledger.open(attachment, rendered)    `call.prompt_ids` go to the engine
    generation = ledger.commit(call, completion, message), or ledger.cancel(call)

Between `open` and `commit` other calls may come and go: concurrent ones become siblings.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from shoal.errors import HistoryDiverged
from shoal.types import Completion, FinishReason, Message, Role, ToolCall, Turn

TAIL_ROLES = frozenset({Role.TOOL, Role.USER})
"""What may follow an answer without its conversation being rendered anew."""


class HistoryPolicy(StrEnum):
    """What becomes of drawn tokens that a client or its template would leave out or change."""

    PRESERVE = "preserve"
    """They stay in context: a drawn answer is followed by new messages only."""
    TEMPLATE = "template"
    """A new user message renders the conversation anew, as templates want that drop earlier reasoning."""
    STRICT = "strict"
    """A request must extend the newest answer; any other is refused."""


class Cause(StrEnum):
    """Why a prompt was rendered in full."""

    FIRST = "first"
    """The session had drawn nothing yet."""
    DIVERGED = "diverged"
    """No generation begins the conversation: edited, compacted, of a sub-agent, or with other tools."""
    ROLES = "roles"
    """The new messages are not only of tools and users."""
    SEGMENT = "segment"
    """The policy is `template`, and the user spoke."""
    NO_BRIDGE = "no_bridge"
    """The template cannot render the new messages by themselves."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request brings: messages, and what else the template renders."""

    messages: tuple[Message, ...]
    tools: str = ""  # JSON array; empty when there are none
    template: str = ""  # JSON object of further template arguments; empty when there are none


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a conversation goes on. `cause` is None exactly when it extends a generation."""

    conversation: Conversation
    parent: int | None
    tail: tuple[Message, ...]
    """The messages since the parent's answer; all of them when there is no parent."""
    cause: Cause | None
    hash: bytes
    """Of the whole conversation."""
    continues: bool = False
    """Nothing is said after the parent's answer, which was cut short: it goes on where it stopped."""


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """A generation under way."""

    id: int
    attachment: Attachment
    rendered_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Generation:
    """A node of the forest: what was rendered after the parent's tokens, and what was drawn after that."""

    id: int
    parent: int | None
    rendered_ids: tuple[int, ...]
    completion: Completion
    tail: tuple[Message, ...]
    message: Message
    """The answer as the client was told; of a continuation, the whole answer."""
    continues: bool
    digest: str
    ill_formed: bool


class TokenTree:
    """The forest of a session's generations; append-only.

    Invariant: the tokens before a generation's completion, from its root down, are exactly those that the engine had in
    context when it drew it, and the drawn ones among them are the ids that were drawn, never re-tokenised text. In
    `turns` every drawn token is trainable in exactly one row; those of undelivered duplicates are in none.
    """

    def __init__(self, policy: HistoryPolicy = HistoryPolicy.PRESERVE) -> None:
        self.policy = policy
        self.truncated = False
        """Whether the newest request did not fit the context; set by the caller."""
        self._generations: dict[int, Generation] = {}
        self._children: dict[int | None, list[int]] = {None: []}
        self._calls: dict[int, OpenGeneration] = {}
        self._next_id = 0
        self._by_hash: dict[bytes, list[int]] = {}
        self._hash_before: dict[int, bytes] = {}  # of the messages before the generation's answer
        self._by_digest: dict[str, list[int]] = {}
        self._delivered: set[int] = set()

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All of them, in the order of their commits."""
        return tuple(self._generations.values())

    @property
    def calls(self) -> tuple[OpenGeneration, ...]:
        """Those under way."""
        return tuple(self._calls.values())

    def attach(self, conversation: Conversation) -> Attachment:
        """The deepest generation that the conversation begins with, and what it says after that.

        Hashes of messages are compared, so that nothing is tokenised. Raises `HistoryDiverged`.
        """
        messages, hashes = conversation.messages, chain(conversation)
        for end in range(len(messages), 0, -1):
            if messages[end - 1].role is Role.ASSISTANT and hashes[end] in self._by_hash:
                parent = self._twin(self._by_hash[hashes[end]], messages[:end])
                return self._checked(self._attached(conversation, hashes[-1], parent, messages[end:]))
        cause = Cause.DIVERGED if self._generations or self._calls else Cause.FIRST
        return self._checked(Attachment(conversation, None, messages, cause, hashes[-1]))

    def detached(self, attachment: Attachment, cause: Cause) -> Attachment:
        """The same conversation as a new root: it has to be rendered in full. Raises `HistoryDiverged`."""
        messages = attachment.conversation.messages
        return self._checked(replace(attachment, parent=None, tail=messages, cause=cause, continues=False))

    def open(self, attachment: Attachment, rendered_ids: Sequence[int], digest: str = "") -> OpenGeneration:
        """Begins a generation. `rendered_ids` are the whole prompt of a root; else the bridge.

        A bridge begins with the token that closes the parent's answer. It is left out when the engine drew it, and
        stays, untrained, when the answer was cut short.
        """
        rendered, before = tuple(rendered_ids), self._path_ids(attachment.parent)
        if attachment.parent is not None and rendered:
            drawn = self._generations[attachment.parent].completion
            if drawn.finish_reason is FinishReason.STOP and drawn.token_ids[-1:] == rendered[:1]:
                rendered = rendered[1:]
        call = OpenGeneration(self._next_id, attachment, rendered, before + rendered, digest)
        self._next_id += 1
        self._calls[call.id] = call
        return call

    def cancel(self, call: OpenGeneration) -> None:
        """Forgets a call from which nothing came."""
        self._calls.pop(call.id, None)

    def commit(
        self, call: OpenGeneration, completion: Completion, message: Message, *, ill_formed: bool = False
    ) -> Generation:
        """Keeps what was drawn for a call, and the message that the client is told."""
        assert self._calls.pop(call.id, None) is call, "a call is committed once"
        attachment = call.attachment
        parent = None if attachment.parent is None else self._generations[attachment.parent]
        whole = message
        if attachment.continues and parent is not None:
            whole = joined(parent.message, message)
        generation = Generation(
            call.id,
            attachment.parent,
            call.rendered_ids,
            completion,
            attachment.tail,
            whole,
            attachment.continues,
            call.digest,
            ill_formed,
        )
        self._generations[call.id] = generation
        self._children[call.id] = []
        self._by_digest.setdefault(call.digest, []).append(call.id)
        self._children[attachment.parent].append(call.id)
        self._index(generation, message, attachment.hash)
        if attachment.parent is not None:
            self._delivered.add(attachment.parent)  # the client has quoted it
        return generation

    def deliver(self, generation_id: int) -> None:
        """Marks that the client was given this answer."""
        self._delivered.add(generation_id)

    def retried(self, digest: str) -> OpenGeneration | Generation | None:
        """What an equal request has already begun or drawn; the newest, when there are several."""
        found: list[OpenGeneration | Generation] = [call for call in self._calls.values() if call.digest == digest]
        found += [self._generations[one] for one in self._by_digest.get(digest, [])]
        return max(found, key=lambda one: one.id, default=None)

    def prompt_ids(self, generation: Generation) -> tuple[int, ...]:
        """What the engine had in context."""
        return self._path_ids(generation.parent) + generation.rendered_ids

    def exported(self) -> list[Generation]:
        """Depth first, so that a row goes on from turn to turn and ends at a leaf; without undelivered duplicates."""
        result: list[Generation] = []
        pending = list(reversed(self._children[None]))
        while pending:
            generation = self._generations[pending.pop()]
            if not self._superseded(generation):
                result.append(generation)
            pending += reversed(self._children[generation.id])
        return result

    def turns(self) -> tuple[Turn, ...]:
        """What a `Rollout` is made of, in the order in which it was begun.

        `train.advantage.rows` makes one row of each leaf; a shared generation trains in the first of its leaves only.
        """
        drawn = sorted(self.exported(), key=lambda generation: generation.id)
        return tuple(Turn(self.prompt_ids(one), one.completion) for one in drawn)

    def messages(self) -> tuple[Message, ...]:
        """The conversation that ends in the newest answer; empty when nothing was drawn."""
        newest = max((generation.id for generation in self.exported()), default=None)
        return () if newest is None else self.conversation(newest)

    def conversation(self, generation_id: int) -> tuple[Message, ...]:
        """The messages that end in a generation's answer. Raises `KeyError` for one that was not drawn."""
        parts: list[tuple[Message, ...]] = []
        answered = False
        at: int | None = generation_id
        while at is not None:
            generation = self._generations[at]
            parts.append((*generation.tail, *(() if answered else (generation.message,))))
            answered, at = generation.continues, generation.parent
        return tuple(message for part in reversed(parts) for message in part)

    def _attached(self, conversation: Conversation, whole: bytes, parent: int, tail: tuple[Message, ...]) -> Attachment:
        roles = {message.role for message in tail}
        cause = None
        if not roles <= TAIL_ROLES:
            cause = Cause.ROLES
        elif self.policy is HistoryPolicy.TEMPLATE and Role.USER in roles:
            cause = Cause.SEGMENT
        if cause is not None:
            return Attachment(conversation, None, conversation.messages, cause, whole)
        continues = not tail and self._generations[parent].completion.finish_reason is not FinishReason.STOP
        return Attachment(conversation, parent, tail, None, whole, continues)

    def _checked(self, attachment: Attachment) -> Attachment:
        """Raises `HistoryDiverged` where the policy is `strict` and the newest answer is not extended."""
        if self.policy is not HistoryPolicy.STRICT or attachment.cause is Cause.FIRST:
            return attachment
        if attachment.cause is not None:
            raise HistoryDiverged(
                f"messages: expected the session's conversation and what follows it, got another ({attachment.cause}); "
                "open a new session, or one with history_policy 'preserve'"
            )
        under_way = any(call.attachment.parent == attachment.parent for call in self._calls.values())
        if under_way or self._children[attachment.parent]:
            raise HistoryDiverged("messages: expected an extension of the newest answer, got one of an earlier answer")
        return attachment

    def _twin(self, ids: list[int], messages: Sequence[Message]) -> int:
        """Which of the generations with equal conversations the client holds: the tool-call ids tell, else the newest
        of those that were delivered."""
        if len(ids) == 1:
            return ids[0]
        held = {call.id for message in messages for call in message.tool_calls}
        return max(ids, key=lambda one: (len(held & self._call_ids(one)), one in self._delivered, one))

    def _call_ids(self, generation_id: int) -> set[str]:
        found: set[str] = set()
        at: int | None = generation_id
        while at is not None:
            found |= {call.id for call in self._generations[at].message.tool_calls}
            at = self._generations[at].parent
        return found

    def _index(self, generation: Generation, message: Message, before: bytes) -> None:
        keys = {_link(before, message)}
        if generation.continues and generation.parent is not None:
            before = self._hash_before[generation.parent]
            keys.add(_link(before, generation.message))  # a client may keep the parts of an answer or join them
        self._hash_before[generation.id] = before
        for key in keys:
            self._by_hash.setdefault(key, []).append(generation.id)

    def _superseded(self, generation: Generation) -> bool:
        """Whether the client never got this answer, but one to an equal request."""
        if generation.id in self._delivered or not generation.digest:
            return False
        equals = (one for one in self._by_digest[generation.digest] if one != generation.id)
        return any(one in self._delivered or one < generation.id for one in equals)

    def _path_ids(self, generation_id: int | None) -> tuple[int, ...]:
        """All tokens from the root to the end of a generation's completion."""
        parts: list[tuple[int, ...]] = []
        at = generation_id
        while at is not None:
            generation = self._generations[at]
            parts += [generation.completion.token_ids, generation.rendered_ids]
            at = generation.parent
        return tuple(itertools.chain.from_iterable(reversed(parts)))


def chain(conversation: Conversation) -> list[bytes]:
    """The hash of the first i messages, for every i; tools and template arguments come before the first."""
    hashes = [_hash(conversation.tools.encode(), conversation.template.encode())]
    for message in conversation.messages:
        hashes.append(_link(hashes[-1], message))
    return hashes


def minted_id(session: str, generation_id: int, index: int) -> str:
    """The id of a generation's tool call: nine letters and digits, as the strictest templates want."""
    number = int.from_bytes(_hash(session.encode(), b"%d" % generation_id, b"%d" % index), "big")
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "".join(letters[number // 36**place % 36] for place in range(9))


def joined(first: Message, rest: Message) -> Message:
    """An answer that was cut short, with what it went on to say."""
    return replace(
        first,
        content=first.content + rest.content,
        tool_calls=first.tool_calls + rest.tool_calls,
        reasoning=first.reasoning + rest.reasoning,
    )


def _link(before: bytes, message: Message) -> bytes:
    return _hash(before, message.role.value.encode(), *_view(message))


def _view(message: Message) -> tuple[bytes, ...]:
    """What two messages must agree in to be the same: everything; of an assistant's, what clients leave alone.

    Clients strip answers, write arguments anew, replace ids and drop reasoning; none of that changes what was drawn.
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
    """Of the parts and where they end."""
    return blake2b(b"".join([b"%d:%b" % (len(part), part) for part in parts]), digest_size=16).digest()
