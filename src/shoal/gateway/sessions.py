"""Sessions: each answer extends a token tree; a sampler samples outside the lock. Trained ones have a registry."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import ContextOverflow, EngineUnavailable, SessionError
from shoal.gateway.answer_request import Answering, AnswerRequest, AnswerSampler, SessionContext, TrainedSampler
from shoal.gateway.conversation import Conversation, minted_id, session_name, text_size
from shoal.gateway.token_tree import Attachment, Cause, Generation, OpenGeneration, TokenTree
from shoal.interfaces import Engine, FinishedTurns
from shoal.types import Message, Role, Sampling, ToolCall, seed_for

if TYPE_CHECKING:
    from shoal.gateway.promotion import Trial


ENDED = "session: it has ended; open a new one"


class SessionOver(SessionError):
    """Error of a session that has ended or reached one of its limits (HTTP 410)."""

    http_status = 410


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session."""

    generations: int = 256
    drawn_tokens: int = 1 << 20
    age_s: float = 3600.0
    at_once: int = 256
    """Answers under way: one session, whose key the model's commands may have, must not fill the engines' queues."""


class OpenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    sampling: Sampling | None = None
    """Overrides the client's sampling parameters; the client may still ask for fewer tokens."""
    limits: SessionLimits = SessionLimits()


DEFAULTS = OpenRequest()
ONE_REQUEST = OpenRequest(limits=SessionLimits(generations=1 << 20, at_once=1 << 20))
"""Settings of an untrained session, which has one request; the request bounds its answers."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """State that all choices of a prompt share."""

    ask: AnswerRequest
    attachment: Attachment
    rendered: Sequence[int]
    grammar: str
    written: int
    """Number of the prompt's last tokens that belong to the answer."""
    before: Message | None
    """Earlier part of the answer."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """An answer to be sampled."""

    answering: Answering
    call: OpenGeneration
    ask: AnswerRequest
    sampling: Sampling


class Session:
    """One conversation of one client, with all its branches.

    Invariant: in a trained session, sampled tokens enter the tree before the client sees them. A disconnect stops
    nothing there: the client's retry finds the generation under way, or the answer.
    """

    def __init__(self, context: SessionContext, asked: OpenRequest, sampler: AnswerSampler) -> None:
        self.token = secrets.token_urlsafe(18)
        self.tree = TokenTree(session_name(self.token))
        self.context = context
        self.ended = ""
        """Why the session ended; empty while it is open."""
        self.tokens_held = 0
        self.used_s = context.clock()
        """Time of the last request or answer."""
        self._sampler = sampler
        self._sampling = asked.sampling
        self._limits = asked.limits
        self._began_s = context.clock()
        self._lock = asyncio.Lock()
        self._generating: dict[int, Answering] = {}

    @property
    def is_trained(self) -> bool:
        """Whether the sampled tokens may be trained."""
        return self._sampler.is_trained

    @property
    def is_busy(self) -> bool:
        """Whether the session is rendering or sampling."""
        return bool(self._generating) or self._lock.locked()

    async def generation(self, ask: AnswerRequest) -> Generation:
        """The one answer to a request. Raises a `ShoalError`."""
        (answering,) = await self.answers([ask], asyncio.Queue())
        return await asyncio.shield(answering.ended)

    async def answers(self, asks: Sequence[AnswerRequest], news: "asyncio.Queue[Answering]") -> list[Answering]:
        """Begins the answers to the prompts of one request, or finds those of an equal earlier request.

        All prompts are rendered and checked before the first token is sampled. `news` gets an answer when it has grown
        or ended. Raises a `ShoalError`.
        """
        async with self._lock:
            if self.ended:
                raise SessionOver(self.ended)
            answers, opened = list[Answering](), list[_Opened]()
            try:
                for ask in asks:
                    await self._open(ask, answers, opened, news)
            except BaseException as error:
                for call in [one for one in self.tree.calls.values() if one.id not in self._generating]:
                    self.tree.cancel(call)
                if isinstance(error, ContextOverflow):
                    self.tree.truncated = True
                raise
            for one in opened:
                self._begin(one)
        for answering in answers:
            answering.ended.add_done_callback(partial(_put, news, answering))
        return answers

    async def leave(self, answers: Sequence[Answering]) -> None:
        """Ends answers of an untrained session once its client has disconnected or received all of them."""
        if not self.is_trained:
            for answering in answers:
                answering.ended.cancel()
            await asyncio.gather(*(answering.ended for answering in answers), return_exceptions=True)

    async def end(self, reason: str = ENDED) -> None:
        """Refuses new requests and waits for those under way."""
        self.ended = self.ended or reason  # requests that wait for the lock are refused
        async with self._lock:  # waits for a request that is being rendered
            pass
        await asyncio.gather(*(one.ended for one in self._generating.values()), return_exceptions=True)

    def _check_limits(self) -> None:
        sampled = self.tree.generations
        if len(self.tree.calls) >= self._limits.at_once:
            raise EngineUnavailable(
                f"session: expected at most {self._limits.at_once} answers under way; ask for fewer"
            )
        if len(sampled) + len(self.tree.calls) >= self._limits.generations:
            raise SessionOver(f"session: expected at most {self._limits.generations} generations, they are drawn")
        if sum(len(one.completion.token_ids) for one in sampled) >= self._limits.drawn_tokens:
            raise SessionOver(f"session: expected at most {self._limits.drawn_tokens} drawn tokens, they are drawn")
        if self.context.clock() - self._began_s > self._limits.age_s:
            raise SessionOver(f"session: expected requests within {self._limits.age_s:g} s of its begin")

    async def _open(
        self, ask: AnswerRequest, answers: list[Answering], opened: list[_Opened], news: "asyncio.Queue[Answering]"
    ) -> None:
        """Adds the answers to a prompt to `answers`, and those still to be sampled also to `opened`."""
        opening: _Opening | None = None
        for choice in range(ask.choices):
            digest = ask.digest and f"{ask.digest}{len(answers) or ''}"
            found = self.tree.retried(digest) if ask.is_retry and digest else None  # untrained answers have no digest
            if found is not None:
                self.context.counted["replays"] += 1
                answers.append(self._found(found, ask, news))
                continue
            self._check_limits()  # after the replays: earlier answers can still be fetched again
            opening = opening or await self._opening(ask)
            call = self.tree.open(opening.attachment, opening.rendered, digest)
            self.context.check_fits("messages", len(call.prompt_ids))
            answering = Answering(call.id, call.prompt_ids, self.context.reader(ask, opening.before), news)
            answers.append(answering)
            opened.append(_Opened(answering, call, ask, self._sampling_of(call, opening, choice)))

    def _found(
        self, found: OpenGeneration | Generation, ask: AnswerRequest, news: "asyncio.Queue[Answering]"
    ) -> Answering:
        """Answer to an earlier request."""
        if isinstance(found, OpenGeneration):
            return self._generating[found.id]
        answering = Answering(found.id, self.tree.prompt_ids(found), self.context.reader(ask), news)
        answering.ended = asyncio.get_running_loop().create_future()
        answering.ended.set_result(answering.settle(found))
        return answering

    async def _opening(self, ask: AnswerRequest) -> _Opening:
        """Renders a prompt."""
        if ask.prompt is None:
            attachment, rendered = await self._rendered(ask.conversation)
        else:  # a placeholder conversation identifies it, once it is known to fit
            rendered = await self.context.prompt_ids(ask.prompt)
            named = Conversation((Message(Role.USER, repr(rendered)),), template="tokens")
            attachment = self.tree.attach(named)
        written = len(self.context.renderer.token_ids(ask.conversation.begun)) + self.tree.begun_tokens(attachment)
        parent = attachment.parent if attachment.continues else None
        before = None if parent is None else self.tree.conversation(parent)[-1]
        return _Opening(ask, attachment, rendered, self.context.grammar(ask), written, before)

    async def _rendered(self, conversation: Conversation) -> tuple[Attachment, Sequence[int]]:
        """Where a conversation continues in the tree, and the tokens from there to the answer."""
        size = text_size(conversation.messages, conversation.tools)
        attachment = await self.context.computed(size, self.tree.attach, conversation)
        rendered = await self.context.bridge(attachment) if attachment.cause is None else None
        if rendered is None:
            if attachment.cause is None:
                attachment = self.tree.detached(attachment, Cause.NO_BRIDGE)
            rendered = await self.context.rendered(conversation)
        self.context.counted["bridges" if attachment.cause is None else f"forced_{attachment.cause}"] += 1
        return attachment, rendered

    def _begin(self, one: _Opened) -> None:
        def settled(task: asyncio.Task[Generation]) -> None:
            self._generating.pop(one.call.id, None)
            self.context.tasks.discard(task)
            if not task.cancelled():
                task.exception()  # its waiters get the error

        task = asyncio.get_running_loop().create_task(self._generate(one), name=f"session {self.token[:6]}")
        one.answering.ended = task
        self._generating[one.call.id] = one.answering
        self.context.tasks.add(task)
        task.add_done_callback(settled)

    async def _generate(self, one: _Opened) -> Generation:
        answering, call, began_s = one.answering, one.call, self.context.clock()
        try:
            completion = await self._sampler.completion(answering, one.ask, one.sampling, self.token)
        except BaseException:
            self.tree.cancel(call)
            raise
        answer = answering.text.whole
        calls = tuple(
            ToolCall(minted_id(self.token, call.id, index), sampled.name, sampled.arguments)
            for index, sampled in enumerate(answer.calls)
        )
        message = Message(Role.ASSISTANT, answer.content, calls, reasoning=answer.reasoning)
        self.context.counted["drawn_tokens"] += len(completion.token_ids)
        kept = text_size(call.attachment.tail, call.attachment.conversation.tools)  # not all of it is rendered
        self.tokens_held += len(call.rendered_ids) + len(completion.token_ids) + kept // HELD_CHARACTERS
        self.tree.truncated = False
        self.used_s = self.context.clock()
        self.context.latencies_s.append(self.used_s - began_s)
        ill_formed, stop = answer.ill_formed, answering.text.stop
        return answering.settle(self.tree.commit(call, completion, message, ill_formed=ill_formed, stop=stop))

    def _sampling_of(self, call: OpenGeneration, opening: _Opening, choice: int) -> Sampling:
        """Sampling parameters of a generation. Raises `SessionError` for numbers out of range."""
        own, stops = self._sampling, self.context.renderer.stop_token_ids
        made = opening.ask.sampling.sampling(self.context.max_model_len - len(call.prompt_ids), stops, choice)
        if own is not None:
            seed = None if own.seed is None else seed_for("session", own.seed, call.id)
            most = min(made.max_tokens, own.max_tokens)
            made = replace(own, max_tokens=most, stop_token_ids=own.stop_token_ids or stops, seed=seed)
        return replace(made, grammar=opening.grammar, begun=opening.written)


def _put(news: "asyncio.Queue[Answering]", answering: Answering, _: object) -> None:
    news.put_nowait(answering)


CLOSED_KEPT = 4096
HELD_CHARACTERS = 64
"""Characters of messages that count as a held token."""
SHARES = 8
"""A session with more than one of so many shares of the held tokens is the first to go, also while it is busy."""


class SampledTurn(msgspec.Struct):
    """One generation as it was sampled."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    ill_formed: bool
    parent: int | None = None
    """Index of the turn whose tokens are a prefix of `prompt_ids`; None for a new root."""


class Export(msgspec.Struct):
    """Answer of `POST /s/<token>/end`: the session's turns, in the order in which they began."""

    messages: tuple[Message, ...]
    turns: list[SampledTurn]
    truncated: bool


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """Bounds over all open sessions together. A held token takes 40 to 80 bytes."""

    sessions: int = 20_000
    idle_s: float = 3600.0
    """Seconds without a request after which a session is evicted."""
    tokens: int = 1 << 25
    """Tokens that open sessions may hold; beyond it the largest sessions (`SHARES`) are evicted, then the longest idle
    ones."""


class Sessions:
    """Open sessions by the token in their URLs, and the reasons why the last ones were closed.

    Eviction discards a session's sampled tokens. A run exports them and ends its sessions long before.
    """

    def __init__(
        self, context: SessionContext, engine: Engine, bounds: SessionBounds, trial: "Trial | None" = None
    ) -> None:
        self.context = context
        self._engine, self._trial = engine, trial
        self.bounds = bounds
        self.closed: dict[str, str] = {}
        """Reasons by token, oldest first; older tokens are unknown."""
        self._open: dict[str, Session] = {}  # the longest unused first
        self._is_full = False  # tokens: all held by busy sessions

    def __len__(self) -> int:
        return len(self._open)

    def open(self, asked: OpenRequest = DEFAULTS, priority: int = 0, turns: FinishedTurns | None = None) -> Session:
        """Opens a trained session. Raises `EngineUnavailable` when too many are open."""
        if len(self._open) >= self.bounds.sessions:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.sessions} open ones; end some")
        if self._is_full:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.tokens} tokens held; end some")
        sampler = TrainedSampler(self.context, self._engine, priority, turns)
        session = Session(self.context, asked, self._trial.sampler(sampler) if self._trial else sampler)
        self._open[session.token] = session
        self.context.counted["sessions"] += 1
        return session

    def get(self, token: str) -> Session | None:
        """Open session of a token; the call counts as use."""
        session = self._open.pop(token, None)
        if session is not None:
            self._open[token] = session
            session.used_s = self.context.clock()
        return session

    async def end(self, session: Session, reason: str = ENDED) -> None:
        """Closes a session; later requests to it get the reason."""
        await session.end(reason)
        if self._open.pop(session.token, None) is None:  # another request has closed it meanwhile
            return
        self.closed[session.token] = session.ended
        while len(self.closed) > CLOSED_KEPT:
            del self.closed[next(iter(self.closed))]

    async def evict(self) -> None:
        """Closes sessions idle for too long, and large ones and the longest unused while too many tokens are held."""
        share = self.bounds.tokens // SHARES
        now_s, held = self.context.clock(), sum(session.tokens_held for session in self._open.values())
        for session in sorted(self._open.values(), key=lambda one: one.tokens_held <= share):
            idle_s = now_s - session.used_s
            is_wanted = held <= self.bounds.tokens and idle_s <= self.bounds.idle_s
            is_working = session.is_busy and session.tokens_held <= share
            if is_wanted or is_working or session.token not in self._open:
                continue
            why = f"after {idle_s:.0f} s without a request"
            if idle_s <= self.bounds.idle_s:
                why += f", when open sessions held more than {self.bounds.tokens} tokens"
            held -= session.tokens_held
            await self.end(session, f"session: it was closed {why}")
            self.context.counted["evictions"] += 1
        self._is_full = held > self.bounds.tokens


def export(tree: TokenTree) -> Export:
    """Export of a session's generations."""
    sampled = sorted(tree.exported(), key=lambda generation: generation.id)
    turns = []
    for one, turn in zip(sampled, tree.turns(), strict=True):
        answer, prompt = one.completion, tree.prompt_ids(one)
        streams = (answer.token_ids, answer.logprobs, answer.versions)
        turns.append(SampledTurn(prompt, *streams, answer.finish_reason, one.ill_formed, turn.parent))
    return Export(tree.messages(), turns, tree.truncated)
