"""Sessions that answer: the ledger is asked, texts are rendered in threads, and the engine draws outside the lock."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ParamSpec, Protocol, TypeVar

from shoal.errors import EngineUnavailable, SessionError
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
from shoal.model.chat_template import Answer
from shoal.types import Completion, FinishReason, Message, Role, Sampling, ToolCall, seed_for

ATTEMPTS = 5
RETRY_DELAY_S = 0.1
LATENCIES_KEPT = 4096
INLINE_CHARACTERS = 2048
"""Up to here tokenising takes less than handing it to a thread that competes for the interpreter."""

ENDED = "session: it has ended; open a new one"

P = ParamSpec("P")
T = TypeVar("T")


class ContextOverflow(SessionError):
    """The prompt leaves no room for an answer (HTTP 400)."""


class SessionOver(SessionError):
    """The session has ended, or one of its limits is reached (HTTP 410)."""

    http_status = 410


class SessionRenderer(Protocol):
    """What a session needs of `render.ChatRenderer`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether tools can be shown and calls be read."""
        ...

    def prompt_ids(self, messages: tuple[Message, ...], tools: str = "", template: str = "") -> list[int]:
        """The whole conversation. Raises `SessionError`."""
        ...

    def bridge_ids(self, tail: tuple[Message, ...], tools: str = "", template: str = "") -> list[int] | None:
        """From the close of a drawn answer to the head of the next one."""
        ...

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a text by itself."""
        ...

    def answer(
        self, token_ids: tuple[int, ...], *, tools: bool, template: str = "", after: Message | None = None
    ) -> Answer:
        """What a drawn answer says, of a conversation with tools or template arguments; `after` is its beginning."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session."""

    generations: int = 256
    drawn_tokens: int = 1 << 20
    age_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request for one answer, of whatever wire format. Numbers that are None were not asked for."""

    conversation: Conversation
    digest: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    is_retry: bool = False
    prompt_ids: tuple[int, ...] | None = None
    """The prompt in tokens; the conversation only names it then."""


@dataclass(slots=True)
class SessionCounts:
    """What all sessions did."""

    counted: Counter[str] = field(default_factory=Counter)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What sessions share."""

    engine: Engine
    renderer: SessionRenderer
    max_model_len: int
    pool: ThreadPoolExecutor
    counts: SessionCounts
    clock: Callable[[], float]
    tasks: set[asyncio.Task[Generation]]

    async def computed(self, size: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What a function gives for a text of about `size` characters: long ones must not stop the event loop."""
        if size <= INLINE_CHARACTERS:
            return function(*args, **options)
        return await self.in_thread(function, *args, **options)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What a function gives that takes long, or waits for a disk."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: function(*args, **options))

    async def completion(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, priority: int = 0, session: str = ""
    ) -> Completion:
        """An answer as a whole: what was aborted goes on from the tokens that were drawn.

        Raises `EngineUnavailable` after some attempts.
        """
        drawn = Completion((), (), (), FinishReason.ABORT)
        for attempt in range(ATTEMPTS):
            left = sampling.max_tokens - len(drawn.token_ids)
            if left == 0:
                return replace(drawn, finish_reason=FinishReason.LENGTH)
            rest = replace(sampling, max_tokens=left) if drawn.token_ids else sampling
            try:
                context = prompt_ids + drawn.token_ids
                (part,) = await self.engine.generate(context, rest, priority=priority, session=session)
                drawn = _continued(drawn, part) if drawn.token_ids else part
            except EngineUnavailable:
                if attempt == ATTEMPTS - 1:
                    raise
            if drawn.finish_reason is not FinishReason.ABORT:
                return drawn
            await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        raise EngineUnavailable(f"the engine aborted the answer {ATTEMPTS} times")


class Session:
    """One conversation of one client, with whatever branches it grows.

    Invariant: what was drawn is in the ledger before anybody is told of it. A client that goes away stops nothing: its
    retry finds the call under way, or the answer.
    """

    def __init__(
        self,
        token: str,
        desk: SessionContext,
        *,
        sampling: Sampling | None,
        limits: SessionLimits,
        policy: HistoryPolicy,
        priority: int = 0,
    ) -> None:
        """`sampling` wins over what clients ask for, save that they may ask for fewer tokens."""
        self.token = token
        self.ledger = TokenTree(policy)
        self.ended = ""
        """Why it answers no more; empty while it does."""
        self.tokens_held = 0
        self.used_s = desk.clock()
        """When it was last asked, or answered."""
        self._desk = desk
        self._sampling = sampling
        self._limits = limits
        self._priority = priority
        self._began_s = desk.clock()
        self._lock = asyncio.Lock()
        self._draws: dict[int, asyncio.Task[Generation]] = {}

    async def generation(self, ask: AnswerRequest) -> Generation:
        """The answer to a request. Raises a `ShoalError`."""
        began_s = self._desk.clock()
        async with self._lock:
            if self.ended:
                raise SessionOver(self.ended)
            found = self.ledger.retried(ask.digest) if ask.is_retry else None
            if found is not None:
                self._desk.counts.counted["replays"] += 1
            if isinstance(found, Generation):
                return found
            if found is None:
                self._check_limits()  # what was drawn before they were reached can still be asked for again
            task = self._draws[found.id] if found is not None else self._begun(await self._opened(ask), ask)
        generation = await asyncio.shield(task)
        self.used_s = self._desk.clock()
        self._desk.counts.latencies_s.append(self.used_s - began_s)
        return generation

    def deliver(self, generation: Generation) -> None:
        """Marks that the client was given the answer."""
        self.ledger.deliver(generation.id)

    @property
    def is_busy(self) -> bool:
        """Whether something is being rendered or drawn."""
        return bool(self._draws) or self._lock.locked()

    async def end(self, reason: str = ENDED) -> None:
        """Refuses new requests and waits for those under way."""
        async with self._lock:  # whoever is being rendered begins first
            self.ended = self.ended or reason
        await asyncio.gather(*self._draws.values(), return_exceptions=True)

    def _check_limits(self) -> None:
        drawn = self.ledger.generations
        if len(drawn) + len(self.ledger.calls) >= self._limits.generations:
            raise SessionOver(f"session: expected at most {self._limits.generations} generations, they are drawn")
        if sum(len(one.completion.token_ids) for one in drawn) >= self._limits.drawn_tokens:
            raise SessionOver(f"session: expected at most {self._limits.drawn_tokens} drawn tokens, they are drawn")
        if self._desk.clock() - self._began_s > self._limits.age_s:
            raise SessionOver(f"session: expected requests within {self._limits.age_s:g} s of its begin")

    async def _opened(self, ask: AnswerRequest) -> OpenGeneration:
        """The call, with its prompt rendered."""
        counted = self._desk.counts.counted
        if ask.conversation.tools and not self._desk.renderer.takes_tools:
            raise SessionError("tools: expected none, the model's chat template does not know them")
        attachment = self.ledger.attach(ask.conversation)
        if ask.prompt_ids is not None:
            return self._fitting(self.ledger.open(attachment, ask.prompt_ids, ask.digest))
        rendered = await self._bridge(attachment)
        if rendered is None:
            if attachment.cause is None:
                attachment = self.ledger.detached(attachment, Cause.NO_BRIDGE)
            conversation = ask.conversation
            rendered = await self._desk.computed(
                _size(conversation.messages, conversation.tools),
                self._desk.renderer.prompt_ids,
                conversation.messages,
                conversation.tools,
                conversation.template,
            )
        counted["bridges" if attachment.cause is None else f"forced_{attachment.cause}"] += 1
        return self._fitting(self.ledger.open(attachment, rendered, ask.digest))

    async def _bridge(self, attachment: Attachment) -> list[int] | None:
        if attachment.cause is not None:
            return None
        if attachment.continues:
            return []
        conversation = attachment.conversation
        return await self._desk.computed(
            _size(attachment.tail, conversation.tools),
            self._desk.renderer.bridge_ids,
            attachment.tail,
            conversation.tools,
            conversation.template,
        )

    def _fitting(self, call: OpenGeneration) -> OpenGeneration:
        length, longest = len(call.prompt_ids), self._desk.max_model_len
        if 0 < length < longest:
            return call
        self.ledger.cancel(call)
        self.ledger.truncated = length >= longest
        raise ContextOverflow(f"messages: expected 1 to {longest - 1} tokens, for a context of {longest}; got {length}")

    def _begun(self, call: OpenGeneration, ask: AnswerRequest) -> asyncio.Task[Generation]:
        task = asyncio.get_running_loop().create_task(self._drawn(call, ask), name=f"session {self.token[:6]}")
        self._draws[call.id] = task
        self._desk.tasks.add(task)
        task.add_done_callback(self._settled(call.id))
        return task

    def _settled(self, call_id: int) -> Callable[[asyncio.Task[Generation]], None]:
        def settled(task: asyncio.Task[Generation]) -> None:
            self._draws.pop(call_id, None)
            self._desk.tasks.discard(task)
            if not task.cancelled():
                task.exception()  # it was told to whoever still waits

        return settled

    async def _drawn(self, call: OpenGeneration, ask: AnswerRequest) -> Generation:
        try:
            sampling = self._sampled(call, ask)
            completion = await self._desk.completion(call.prompt_ids, sampling, self._priority, self.token)
            tools = bool(ask.conversation.tools)
            template = ask.conversation.template if ask.prompt_ids is None else ""
            ids, read = completion.token_ids, self._desk.renderer.answer
            parent = call.attachment.parent
            after = None
            if call.attachment.continues and parent is not None:
                after = self.ledger.conversation(parent)[-1]
            answer = await self._desk.computed(4 * len(ids), read, ids, tools=tools, template=template, after=after)
        except BaseException:
            self.ledger.cancel(call)
            raise
        calls = tuple(
            ToolCall(minted_id(self.token, call.id, index), drawn.name, drawn.arguments)
            for index, drawn in enumerate(answer.calls)
        )
        message = Message(Role.ASSISTANT, answer.content, calls, reasoning=answer.reasoning)
        self._desk.counts.counted["drawn_tokens"] += len(ids)
        self.tokens_held += len(call.rendered_ids) + len(ids)
        self.ledger.truncated = False
        return self.ledger.commit(call, completion, message, ill_formed=answer.ill_formed)

    def _sampled(self, call: OpenGeneration, ask: AnswerRequest) -> Sampling:
        """How this call is drawn. Raises `SessionError` for numbers out of range."""
        room = self._desk.max_model_len - len(call.prompt_ids)
        stops = self._desk.renderer.stop_token_ids
        own = self._sampling
        wanted = ask.max_tokens if ask.max_tokens is not None else room
        try:
            if own is None:
                least, temperature, top_p = min(wanted, room), _or_one(ask.temperature), _or_one(ask.top_p)
                return Sampling(least, temperature, top_p, stop_token_ids=stops, seed=ask.seed)
            asked = replace(own, max_tokens=wanted)
        except ValueError as error:
            raise SessionError(str(error)) from error
        return replace(
            own,
            max_tokens=min(asked.max_tokens, own.max_tokens, room),
            stop_token_ids=own.stop_token_ids or stops,
            seed=None if own.seed is None else seed_for("session", own.seed, call.id),
        )


def _or_one(asked: float | None) -> float:
    return 1.0 if asked is None else asked


def _size(messages: tuple[Message, ...], tools: str) -> int:
    return len(tools) + sum(len(message.content) for message in messages)


def _continued(drawn: Completion, part: Completion) -> Completion:
    """What was drawn before and after an abort. Raises `EngineUnavailable` when the engine went back to old weights."""
    try:
        return Completion(
            drawn.token_ids + part.token_ids,
            drawn.logprobs + part.logprobs,
            drawn.versions + part.versions,
            part.finish_reason,
        )
    except ValueError as error:
        raise EngineUnavailable(f"the engine's answer cannot be used: {error}") from error
