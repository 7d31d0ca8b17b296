"""Sessions: each answer extends a token tree; threads render text, and the engine samples outside the lock."""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from shoal.errors import ContextOverflow, EngineUnavailable, SessionError
from shoal.gateway.token_tree import (
    Attachment,
    Cause,
    Conversation,
    Generation,
    HistoryPolicy,
    OpenGeneration,
    TokenTree,
    minted_id,
)
from shoal.interfaces import Engine
from shoal.types import FinishReason, Message, Role, Sampling, ToolCall, seed_for

if TYPE_CHECKING:
    from shoal.model.chat_template import ChatRenderer

LATENCIES_KEPT = 4096
INLINE_CHARACTERS = 2048
"""Characters up to which tokenising takes less time than a thread that competes for the interpreter."""
NO_MESSAGES = Conversation(())
ENDED = "session: it has ended; open a new one"

P = ParamSpec("P")
T = TypeVar("T")


class SessionOver(SessionError):
    """Error of a session that has ended or reached one of its limits (HTTP 410)."""

    http_status = 410


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session."""

    generations: int = 256
    drawn_tokens: int = 1 << 20
    age_s: float = 3600.0


class OpenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    sampling: Sampling | None = None
    """Sampling parameters that win over a client's, except that the client may ask for fewer tokens."""
    limits: SessionLimits = SessionLimits()
    history_policy: HistoryPolicy = HistoryPolicy.PRESERVE


DEFAULTS = OpenRequest()


class SamplingRequest(msgspec.Struct, kw_only=True):
    """Sampling parameters that a client asks for; None was not asked for."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Request for one answer, of any API."""

    conversation: Conversation = NO_MESSAGES
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    digest: str = ""
    is_retry: bool = False
    prompt: str | tuple[int, ...] | None = None
    """Prompt as text or tokens, in place of a conversation."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Parts that all sessions share."""

    engine: Engine
    renderer: "ChatRenderer"
    max_model_len: int
    pool: ThreadPoolExecutor
    clock: Callable[[], float]
    tasks: set[asyncio.Task[Generation]] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))

    async def computed(self, size: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Result of a function on about `size` characters; long texts run in a thread to keep the event loop free."""
        if size <= INLINE_CHARACTERS:
            return function(*args, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, lambda: function(*args, **options))

    async def rendered(self, conversation: Conversation) -> list[int]:
        """Tokens of a whole conversation. Raises `SessionError`."""
        messages, tools = conversation.messages, conversation.tools
        if tools and not self.renderer.takes_tools:
            raise SessionError("tools: expected none, the model's chat template shows no tools")
        render = self.renderer.prompt_ids
        return await self.computed(_size(messages, tools), render, messages, tools, conversation.template)


class Session:
    """One conversation of one client, with all its branches.

    Invariant: sampled tokens enter the tree before a client sees them. A client that disconnects stops nothing: its
    retry finds the generation under way, or the answer.
    """

    def __init__(self, context: SessionContext, asked: OpenRequest, priority: int = 0) -> None:
        """`priority` is the priority of its requests."""
        self.token = secrets.token_urlsafe(18)
        self.tree = TokenTree(asked.history_policy, secrets.token_hex(8))
        self.ended = ""
        """Reason why the session answers no more; empty while it answers."""
        self.tokens_held = 0
        self.used_s = context.clock()
        """Time of the last request or answer."""
        self._context = context
        self._sampling = asked.sampling
        self._limits = asked.limits
        self._priority = priority
        self._began_s = context.clock()
        self._lock = asyncio.Lock()
        self._generating: dict[int, asyncio.Task[Generation]] = {}

    async def generation(self, ask: AnswerRequest) -> Generation:
        """Answers a request. Raises a `ShoalError`."""
        began_s = self._context.clock()
        async with self._lock:
            if self.ended:
                raise SessionOver(self.ended)
            found = self.tree.retried(ask.digest) if ask.is_retry else None
            if found is not None:
                self._context.counted["replays"] += 1
            if isinstance(found, Generation):
                return found
            if found is None:
                self._check_limits()  # tokens sampled before the limit can still be asked for again
            task = self._generating[found.id] if found is not None else self._begin(await self._open(ask), ask)
        generation = await asyncio.shield(task)
        self.used_s = self._context.clock()
        self._context.latencies_s.append(self.used_s - began_s)
        return generation

    @property
    def is_busy(self) -> bool:
        """Whether the session is rendering or sampling."""
        return bool(self._generating) or self._lock.locked()

    async def end(self, reason: str = ENDED) -> None:
        """Refuses new requests and waits for those under way."""
        async with self._lock:  # a request that is being rendered begins first
            self.ended = self.ended or reason
        await asyncio.gather(*self._generating.values(), return_exceptions=True)

    def _check_limits(self) -> None:
        sampled = self.tree.generations
        if len(sampled) + len(self.tree.calls) >= self._limits.generations:
            raise SessionOver(f"session: expected at most {self._limits.generations} generations, they are drawn")
        if sum(len(one.completion.token_ids) for one in sampled) >= self._limits.drawn_tokens:
            raise SessionOver(f"session: expected at most {self._limits.drawn_tokens} drawn tokens, they are drawn")
        if self._context.clock() - self._began_s > self._limits.age_s:
            raise SessionOver(f"session: expected requests within {self._limits.age_s:g} s of its begin")

    async def _open(self, ask: AnswerRequest) -> OpenGeneration:
        """Opens a generation, with its prompt rendered."""
        conversation, prompt = ask.conversation, ask.prompt
        if isinstance(prompt, str):
            prompt = tuple(await self._context.computed(len(prompt), self._context.renderer.token_ids, prompt))
        if prompt is not None:  # a conversation of its own names it
            named = Conversation((Message(Role.USER, repr(prompt)),), template="tokens")
            return self._fitting(self.tree.open(self.tree.attach(named), prompt, ask.digest))
        attachment = self.tree.attach(conversation)
        rendered = await self._bridge(attachment) if attachment.cause is None else None
        if rendered is None:
            if attachment.cause is None:
                attachment = self.tree.detached(attachment, Cause.NO_BRIDGE)
            rendered = await self._context.rendered(conversation)
        self._context.counted["bridges" if attachment.cause is None else f"forced_{attachment.cause}"] += 1
        return self._fitting(self.tree.open(attachment, rendered, ask.digest))

    async def _bridge(self, attachment: Attachment) -> list[int] | None:
        if attachment.continues:
            return []
        tail, tools, bridge = attachment.tail, attachment.conversation.tools, self._context.renderer.bridge_ids
        return await self._context.computed(_size(tail, tools), bridge, tail, tools, attachment.conversation.template)

    def _fitting(self, call: OpenGeneration) -> OpenGeneration:
        length, longest = len(call.prompt_ids), self._context.max_model_len
        if 0 < length < longest:
            return call
        self.tree.cancel(call)
        self.tree.truncated = length >= longest
        raise ContextOverflow(f"messages: expected 1 to {longest - 1} tokens, for a context of {longest}; got {length}")

    def _begin(self, call: OpenGeneration, ask: AnswerRequest) -> asyncio.Task[Generation]:
        def settled(task: asyncio.Task[Generation]) -> None:
            self._generating.pop(call.id, None)
            self._context.tasks.discard(task)
            if not task.cancelled():
                task.exception()  # its waiters get the error

        task = asyncio.get_running_loop().create_task(self._generate(call, ask), name=f"session {self.token[:6]}")
        self._generating[call.id] = task
        self._context.tasks.add(task)
        task.add_done_callback(settled)
        return task

    async def _generate(self, call: OpenGeneration, ask: AnswerRequest) -> Generation:
        try:
            sampling = self._sampling_of(call, ask)
            (completion,) = await self._context.engine.generate(
                call.prompt_ids, sampling, priority=self._priority, session=self.token
            )
            if completion.finish_reason is FinishReason.ABORT:
                raise EngineUnavailable("the engine aborted the answer")
            ids, parent = completion.token_ids, call.attachment.parent
            answer = await self._context.computed(
                4 * len(ids),
                self._context.renderer.answer,
                ids,
                tools=bool(ask.conversation.tools),
                template=ask.conversation.template,
                after=self.tree.conversation(parent)[-1] if call.attachment.continues and parent is not None else None,
            )
        except BaseException:
            self.tree.cancel(call)
            raise
        calls = tuple(
            ToolCall(minted_id(self.token, call.id, index), sampled.name, sampled.arguments)
            for index, sampled in enumerate(answer.calls)
        )
        message = Message(Role.ASSISTANT, answer.content, calls, reasoning=answer.reasoning)
        self._context.counted["drawn_tokens"] += len(ids)
        self.tokens_held += len(call.rendered_ids) + len(ids)
        self.tree.truncated = False
        return self.tree.commit(call, completion, message, ill_formed=answer.ill_formed)

    def _sampling_of(self, call: OpenGeneration, ask: AnswerRequest) -> Sampling:
        """Sampling parameters of this generation. Raises `SessionError` for numbers out of range."""
        room = self._context.max_model_len - len(call.prompt_ids)
        stops = self._context.renderer.stop_token_ids
        own, client = self._sampling, ask.sampling
        most = room if client.max_tokens is None else min(client.max_tokens, room)
        try:
            if own is None:
                temperature, top_p = _or_one(client.temperature), _or_one(client.top_p)
                return Sampling(most, temperature, top_p, stop_token_ids=stops, seed=client.seed)
            most, stops = min(most, own.max_tokens), own.stop_token_ids or stops
            seed = None if own.seed is None else seed_for("session", own.seed, call.id)
            return replace(own, max_tokens=most, stop_token_ids=stops, seed=seed)
        except ValueError as error:
            raise SessionError(str(error)) from error


def _or_one(asked: float | None) -> float:
    return 1.0 if asked is None else asked


def _size(messages: tuple[Message, ...], tools: str) -> int:
    return len(tools) + sum(len(message.content) for message in messages)
