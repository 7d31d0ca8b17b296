"""Token tree of one conversation: for each answer, the engine's context and the tokens sampled from there. Pure.

A client sends messages; an engine needs tokens. Rendering the whole conversation again for each request would
re-tokenise sampled answers. Training would then reinforce tokens that the policy never chose. The tree finds the
longest prefix of a request whose tokens it has, and only the rest is rendered:

    attachment = tree.attach(conversation)          which generation is extended, and by which messages
    rendered   = bridge or full rendering           the caller's, in a thread: see `shoal.model.chat_template`
    call       = tree.open(attachment, rendered)    `call.prompt_ids` go to the engine
    generation = tree.commit(call, completion, message), or tree.cancel(call)

Between `open` and `commit` other calls may come and go: concurrent calls become siblings.
"""

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.gateway.conversation import Conversation, chain, link
from shoal.types import Completion, FinishReason, Message, Role, Turn

TAIL_ROLES = frozenset({Role.TOOL, Role.USER})
"""Roles of messages that may follow an answer without rendering its conversation again."""


class Cause(StrEnum):
    """Reasons for rendering a prompt in full."""

    FIRST = "first"
    """The session has no sampled answer yet."""
    DIVERGED = "diverged"
    """No generation begins the conversation: it was edited or compacted, is a sub-agent's, or has other tools."""
    ROLES = "roles"
    """The new messages have roles other than tool and user."""
    NO_BRIDGE = "no_bridge"
    """The template cannot render the new messages by themselves."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Place where a conversation continues. `cause` is None exactly when it extends a generation."""

    conversation: Conversation
    parent: int | None
    tail: tuple[Message, ...]
    """Messages since the parent's answer; all messages when there is no parent."""
    cause: Cause | None
    hash: bytes
    """Hash of the whole conversation."""
    continues: bool = False
    """Whether no message follows the parent's truncated answer, so the answer continues where it stopped."""


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """Generation under way."""

    id: int
    attachment: Attachment
    rendered_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Generation:
    """Node of the forest: the tokens rendered after the parent's, and the tokens sampled after these."""

    id: int
    parent: int | None
    rendered_ids: tuple[int, ...]
    completion: Completion
    tail: tuple[Message, ...]
    message: Message
    """Whole answer, including the earlier part or the client's beginning that it continues."""
    said: Message
    """Answer as the client received it."""
    continues: bool
    digest: str
    ill_formed: bool
    stop: str = ""
    """Stop text that ended the answer; its tokens are the last of the completion."""


class TokenTree:
    """Forest of a session's generations; append-only.

    Invariant: the tokens from the root to a generation's completion are exactly those in the engine's context when it
    sampled. Sampled tokens among them keep their ids and are never re-tokenised text. In `turns` every sampled token is
    trainable in exactly one row; tokens of undelivered duplicates are in none.
    """

    def __init__(self, name: str = "") -> None:
        """`name` is the prefix of its answers' ids, and not a secret."""
        self.name = name
        self.truncated = False
        """Whether the newest request did not fit the context; the caller sets it."""
        self._generations: dict[int, Generation] = {}
        self._children: dict[int | None, list[int]] = {None: []}
        self.calls: dict[int, OpenGeneration] = {}
        """Generations under way."""
        self._next_id = 0
        self._by_hash: dict[bytes, list[int]] = {}
        self._hash_before: dict[int, bytes] = {}  # hash of the messages before the generation's answer
        self._by_digest: dict[str, list[int]] = {}
        self._delivered: set[int] = set()

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Generations in the order of their commits."""
        return tuple(self._generations.values())

    @property
    def is_cut(self) -> bool:
        """Whether the newest answer ended at a token limit."""
        newest = self._generations[max(self._generations)] if self._generations else None
        return newest is not None and newest.completion.finish_reason is FinishReason.LENGTH

    def attach(self, conversation: Conversation) -> Attachment:
        """Finds the deepest generation that the conversation begins with, and the messages after it.

        The search compares hashes of messages and tokenises nothing.
        """
        if conversation.begun and self._continued(whole := conversation.answered):
            return self.attach(whole)
        messages, hashes = conversation.messages, chain(conversation)
        for end in range(len(messages), 0, -1):
            if messages[end - 1].role is Role.ASSISTANT and hashes[end] in self._by_hash:
                parent, tail = self._twin(self._by_hash[hashes[end]], messages[:end]), messages[end:]
                continues = not tail and self._generations[parent].completion.finish_reason is not FinishReason.STOP
                found = Attachment(conversation, parent, tail, None, hashes[-1], continues)
                bridged = TAIL_ROLES.issuperset(message.role for message in tail)
                return found if bridged else self.detached(found, Cause.ROLES)
        cause = Cause.DIVERGED if self._generations or self.calls else Cause.FIRST
        return Attachment(conversation, None, messages, cause, hashes[-1])

    def detached(self, attachment: Attachment, cause: Cause) -> Attachment:
        """Attachment of the same conversation as a new root, to be rendered in full."""
        messages = attachment.conversation.messages
        return replace(attachment, parent=None, tail=messages, cause=cause, continues=False)

    def open(self, attachment: Attachment, rendered_ids: Sequence[int], digest: str = "") -> OpenGeneration:
        """Begins a generation. `rendered_ids` are the whole prompt of a root, or else the bridge.

        A bridge begins with the token that closes the parent's answer. The token is left out when the engine sampled
        it, and stays, untrained, when the answer was truncated.
        """
        rendered, before = tuple(rendered_ids), self._path_ids(attachment.parent)
        if attachment.parent is not None and rendered:
            sampled = self._generations[attachment.parent].completion
            if sampled.finish_reason is FinishReason.STOP and sampled.token_ids[-1:] == rendered[:1]:
                rendered = rendered[1:]
        call = OpenGeneration(self._next_id, attachment, rendered, before + rendered, digest)
        self._next_id += 1
        self.calls[call.id] = call
        return call

    def cancel(self, call: OpenGeneration) -> None:
        """Forgets a call without a result."""
        self.calls.pop(call.id, None)

    def commit(
        self,
        call: OpenGeneration,
        completion: Completion,
        message: Message,
        *,
        ill_formed: bool = False,
        stop: str = "",
    ) -> Generation:
        """Stores the completion of a call, and the message that the client receives."""
        assert self.calls.pop(call.id, None) is call, "a call is committed once"
        attachment = call.attachment
        parent = None if attachment.parent is None else self._generations[attachment.parent]
        whole = replace(message, content=attachment.conversation.begun + message.content)
        if attachment.continues and parent is not None:
            whole = replace(
                parent.message,
                content=parent.message.content + message.content,
                tool_calls=parent.message.tool_calls + message.tool_calls,
                reasoning=parent.message.reasoning + message.reasoning,
            )
        generation = Generation(
            call.id,
            attachment.parent,
            call.rendered_ids,
            completion,
            attachment.tail,
            whole,
            message,
            attachment.continues,
            call.digest,
            ill_formed,
            stop,
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
        """Records that the client received this answer."""
        self._delivered.add(generation_id)

    def retried(self, digest: str) -> OpenGeneration | Generation | None:
        """Open or committed generation of an equal request; the newest when there are several."""
        found: list[OpenGeneration | Generation] = [call for call in self.calls.values() if call.digest == digest]
        found += [self._generations[one] for one in self._by_digest.get(digest, [])]
        return max(found, key=lambda one: one.id, default=None)

    def prompt_ids(self, generation: Generation) -> tuple[int, ...]:
        """Tokens in the engine's context before the completion."""
        return self._path_ids(generation.parent) + generation.rendered_ids

    def exported(self) -> list[Generation]:
        """Generations depth first, without undelivered duplicates: a row continues turn by turn and ends at a leaf."""
        result: list[Generation] = []
        pending = list(reversed(self._children[None]))
        while pending:
            generation = self._generations[pending.pop()]
            if not self._superseded(generation):
                result.append(generation)
            pending += reversed(self._children[generation.id])
        return result

    def turns(self) -> tuple[Turn, ...]:
        """Turns of a `Rollout`, in the order in which they began.

        `trainer.advantage.rows` makes one row of each leaf; a shared generation trains only in the first of its leaves.
        A re-rendered conversation continues the generation whose path is a prefix of its prompt, if any.
        """
        sampled = sorted(self.exported(), key=lambda generation: generation.id)
        index = {generation.id: i for i, generation in enumerate(sampled)}
        turns = []
        for one in sampled:
            parent, rendered = one.parent, one.rendered_ids
            if parent not in index:
                whole = self.prompt_ids(one)
                parent, known = self._begun(whole, index.keys() & range(one.id))
                rendered = whole[known:]
            turns.append(Turn(rendered, one.completion, parent=None if parent is None else index[parent]))
        return tuple(turns)

    def messages(self) -> tuple[Message, ...]:
        """Conversation that ends in the newest answer; empty when nothing was sampled."""
        newest = max((generation.id for generation in self.exported()), default=None)
        return () if newest is None else self.conversation(newest)

    def conversation(self, generation_id: int) -> tuple[Message, ...]:
        """Messages that end in a generation's answer. Raises `KeyError` for an unknown generation."""
        path = self._path(generation_id)
        messages: list[Message] = []
        for one, later in itertools.zip_longest(path, path[1:]):
            messages += one.tail
            messages += () if later and later.continues else (one.message,)
        return tuple(messages)

    def begun_tokens(self, attachment: Attachment) -> int:
        """Number of sampled tokens of the truncated answer that an attachment continues, over all its parts."""
        found, at = 0, attachment.parent if attachment.continues else None
        while at is not None:
            one = self._generations[at]
            found += len(one.completion.token_ids)
            at = one.parent if one.continues else None
        return found

    def _continued(self, conversation: Conversation) -> bool:
        """Whether a conversation ends in an answer that was cut short."""
        ids = self._by_hash.get(chain(conversation)[-1], [])
        return any(self._generations[one].completion.finish_reason is not FinishReason.STOP for one in ids)

    def _twin(self, ids: list[int], messages: Sequence[Message]) -> int:
        """The generation that the client holds, among several with equal conversations.

        The tool-call ids decide, or else the newest delivered generation wins.
        """
        if len(ids) == 1:
            return ids[0]
        held = {call.id for message in messages for call in message.tool_calls}

        def rank(one: int) -> tuple[int, bool, int]:
            quoted = {call.id for earlier in self._path(one) for call in earlier.message.tool_calls}
            return len(held & quoted), one in self._delivered, one

        return max(ids, key=rank)

    def _index(self, generation: Generation, message: Message, before: bytes) -> None:
        keys = {link(before, message)}
        if generation.continues and generation.parent is not None:
            before = self._hash_before[generation.parent]
        keys.add(link(before, generation.message))  # a client may keep the parts of an answer or join them
        self._hash_before[generation.id] = before
        for key in keys:
            self._by_hash.setdefault(key, []).append(generation.id)

    def _begun(self, prompt: tuple[int, ...], among: Set[int]) -> tuple[int | None, int]:
        """Generation whose path is the longest prefix of a prompt, and the number of tokens of that path."""
        found, known = None, 0
        pending = [(root, 0) for root in reversed(self._children[None])]
        while pending:
            at, start = pending.pop()
            own = self._generations[at].rendered_ids + self._generations[at].completion.token_ids
            end = start + len(own)
            if prompt[start:end] == own:
                if at in among and end > known:
                    found, known = at, end
                pending += [(child, end) for child in reversed(self._children[at])]
        return found, known

    def _superseded(self, generation: Generation) -> bool:
        """Whether the client received another answer to an equal request instead of this one."""
        if generation.id in self._delivered or not generation.digest:
            return False
        equals = (one for one in self._by_digest[generation.digest] if one != generation.id)
        return any(one in self._delivered or one < generation.id for one in equals)

    def _path_ids(self, generation_id: int | None) -> tuple[int, ...]:
        """All tokens from the root to the end of a generation's completion."""
        path = self._path(generation_id)
        return tuple(
            itertools.chain.from_iterable(ids for one in path for ids in (one.rendered_ids, one.completion.token_ids))
        )

    def _path(self, generation_id: int | None) -> list[Generation]:
        """Generations from the root to one."""
        path: list[Generation] = []
        while generation_id is not None:
            path.append(self._generations[generation_id])
            generation_id = path[-1].parent
        return path[::-1]
