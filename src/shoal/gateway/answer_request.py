"""A request in a form of no API, the context that renders it to tokens, and the samplers that answer it."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

import msgspec

from shoal.errors import ContextOverflow, EngineUnavailable, SessionError
from shoal.gateway.answer_text import AnswerText
from shoal.gateway.conversation import Conversation, text_size
from shoal.gateway.grammars import answer_grammar
from shoal.gateway.token_tree import Attachment, Generation
from shoal.interfaces import Engine, FinishedTurns, LogitRules, ModelServer, ServedToken
from shoal.types import Completion, FinishReason, Message, Role, Sampling, seed_for

if TYPE_CHECKING:
    from shoal.model.chat_template import ChatRenderer


LATENCIES_KEPT = 4096
INLINE_CHARACTERS = 2048
"""Texts up to this length are tokenised on the event loop: a thread would wait longer for the interpreter."""
NO_MESSAGES = Conversation(())

P = ParamSpec("P")
T = TypeVar("T")


class SamplingRequest(msgspec.Struct, kw_only=True):
    """Sampling parameters of a request; None where the client set none."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None

    def sampling(self, room: int, stop_token_ids: tuple[int, ...], choice: int = 0) -> Sampling:
        """Sampling of at most `room` tokens; unset filters are off. Raises `SessionError`.

        The first choice has the request's seed, so that it equals the answer to a request with n = 1.
        """
        names = ("temperature", "top_p", "min_p")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stops = (*stop_token_ids, *(self.stop_token_ids or ()))
        seed = self.seed if self.seed is None or choice == 0 else seed_for("choice", self.seed, choice)
        most = room if self.max_tokens is None else min(self.max_tokens, room)
        try:
            return Sampling(most, top_k=max(self.top_k or 0, 0), stop_token_ids=stops, seed=seed, **given)
        except ValueError as error:
            raise SessionError(str(error)) from error


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request of any API for answers to one prompt."""

    conversation: Conversation = NO_MESSAGES
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    choices: int = 1
    """Number of answers."""
    digest: str = ""
    is_retry: bool = False
    streams: bool = False
    """Whether the client wants each token as it comes."""
    prompt: str | tuple[int, ...] | None = None
    """Prompt as text or tokens, in place of a conversation."""
    stops: tuple[str, ...] = ()
    """Texts that end the answer."""
    one_call: bool = False
    """Whether the answer ends after its first tool call."""
    schema: str = ""
    """JSON Schema that the answer satisfies; empty for none."""
    wanted: tuple[str, ...] = ()
    """Names of the tools, one of which the answer must call; empty where a call is optional."""
    rules: LogitRules = field(default_factory=LogitRules)
    """Logit rules; in untrained sessions only."""
    scores_prompt: bool = False
    """Whether the prompt's logprobs are requested; in untrained sessions only."""
    samples: bool = True
    """False where only the prompt is scored."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Parts that all sessions share."""

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
        """Tokens of a whole conversation, up to the point where sampling starts. Raises `SessionError`."""
        return await self.computed(text_size(conversation.messages, conversation.tools), self._whole, conversation)

    async def bridge(self, attachment: Attachment) -> list[int] | None:
        """Tokens between an answer and the next one; None where the template has no bridge. Raises `SessionError`."""
        if attachment.continues:
            return []
        return await self.computed(text_size(attachment.tail, attachment.conversation.tools), self._joint, attachment)

    async def prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Tokens of a prompt given as text or tokens. Raises `SessionError`."""
        if isinstance(prompt, str):
            self._check_length("prompt", len(prompt))
            prompt = tuple(await self.computed(len(prompt), partial(self.renderer.token_ids, begins=True), prompt))
        self.check_fits("prompt", len(prompt))
        return prompt

    def check_fits(self, field: str, length: int) -> None:
        """Raises `SessionError` for an empty prompt, `ContextOverflow` for one that leaves no room for an answer."""
        if not length:
            raise SessionError(f"{field}: expected at least one token, got none")
        if length >= (longest := self.max_model_len):
            why = f"expected 1 to {longest - 1} tokens, for a context of {longest}; got {length}"
            raise ContextOverflow(f"{field}: {why}")

    def reader(self, ask: AnswerRequest, after: Message | None = None) -> AnswerText:
        """Reader of the answer to a request; `after` is the earlier part of the answer."""
        conversation = ask.conversation
        begun = Message(Role.ASSISTANT, conversation.begun) if conversation.begun else None
        return AnswerText(
            self.renderer,
            ask.stops,
            chat=ask.prompt is None,
            tools=bool(conversation.tools),
            template=conversation.template,
            one_call=ask.one_call,
            after=after or begun,
        )

    def grammar(self, ask: AnswerRequest) -> str:
        """Grammar of the answer to a request; empty for none. Raises `SessionError`."""
        tools, template = ask.conversation.tools, ask.conversation.template
        return answer_grammar(self.renderer, ask.schema, ask.wanted, tools, template, one_call=ask.one_call)

    def _whole(self, conversation: Conversation) -> list[int]:
        self._check(conversation)
        self._check_length("messages", text_size(conversation.messages, conversation.tools, thoughts=False))
        whole = self.renderer.prompt_ids(conversation.messages, conversation.tools, conversation.template)
        return [*whole, *self.renderer.token_ids(conversation.begun)]

    def _joint(self, attachment: Attachment) -> list[int] | None:
        conversation = attachment.conversation
        self._check(conversation)
        self._check_length("messages", text_size(attachment.tail, "", thoughts=False))
        bridge = self.renderer.bridge_ids(attachment.tail, conversation.tools, conversation.template)
        return None if bridge is None else [*bridge, *self.renderer.token_ids(conversation.begun)]

    def _check(self, conversation: Conversation) -> None:
        """Raises `SessionError` for a conversation that the model's chat template cannot render."""
        if not self.renderer.has_template:
            raise SessionError(
                "messages: the model has no chat template; send its text to /v1/completions as `prompt`, or put a "
                "chat_template into the model's tokenizer_config.json"
            )
        if conversation.tools and not self.renderer.takes_tools:
            raise SessionError("tools: expected none, the model's chat template shows no tools; leave them out")
        if conversation.begun and (self.renderer.in_channels or self.renderer.opens_thought(conversation.template)):
            raise SessionError(
                "messages: expected a user's or tool's message as the last, since the model begins each answer with a "
                "thought and no answer can be begun for it; leave the last message out"
            )

    def _check_length(self, field: str, characters: int) -> None:
        """Raises `ContextOverflow` for a text that would not fit even in the longest tokens; tokenises nothing."""
        least = characters // self.renderer.longest_token
        if least >= self.max_model_len:
            why = f"expected at most {self.max_model_len - 1} tokens, got at least {least} in {characters} characters"
            raise ContextOverflow(f"{field}: {why}")


FIRST_PIECE = 64
"""Tokens of the first piece of an answer that may end before its stop token; each later piece is twice as long."""
EVERY = 8
"""Tokens between two searches for that end with a model server, when the client does not stream."""


@dataclass(eq=False, slots=True)
class Answering:
    """One answer to a request: the tokens sampled so far, and the generation once it is complete."""

    id: int
    """Id of the generation."""
    prompt_ids: tuple[int, ...]
    text: AnswerText
    news: "asyncio.Queue[Answering]"
    """Gets the answer each time it grows in a stream, and when it ends."""
    ended: "asyncio.Future[Generation]" = field(init=False)
    generation: Generation | None = None
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """Nats."""
    tops: Sequence[tuple[tuple[int, float], ...]] = ()
    """Most likely tokens at each position; from model servers only."""
    scored: tuple[ServedToken, ...] = ()
    """Tokens of the prompt after its first, if their logprobs are requested."""
    hidden: int = 0
    """Number of last tokens that spell the stop text; the answer omits their logprobs."""

    def settle(self, generation: Generation) -> Generation:
        """Sets the complete answer."""
        self.generation, sampled = generation, generation.completion
        self.token_ids, self.logprobs = sampled.token_ids, sampled.logprobs
        return generation


class AnswerSampler(Protocol):
    """Samples the answers of a session."""

    @property
    def is_trained(self) -> bool:
        """Whether the tokens may be trained: logprobs are those of sampling, and clients cannot stop an answer."""

    async def completion(
        self, answering: Answering, ask: AnswerRequest, sampling: Sampling, session: str
    ) -> Completion:
        """Samples an answer up to its stop token, stop text or first call, and reads its text.

        `session` is the session's token. Raises an `EngineError`.
        """


@dataclass(frozen=True, slots=True)
class TrainedSampler:
    """Implements `AnswerSampler` with engines that record logprobs and Versions as sampled."""

    context: SessionContext
    engine: Engine
    priority: int = 0
    turns: FinishedTurns | None = None
    """Takes finished turns; those of a killed run are answered from it."""
    is_trained = True

    async def completion(
        self, answering: Answering, ask: AnswerRequest, sampling: Sampling, session: str
    ) -> Completion:
        """Implements `AnswerSampler`."""
        if self.turns is None:
            return await self._sampled(answering, sampling, session)
        ends = ask.stops, ask.one_call
        whole = self.turns.take(answering.prompt_ids, sampling, ends)
        if whole is not None:
            size = 4 * len(whole.token_ids)
            await self.context.computed(size, answering.text.add, whole.token_ids, last=True)
            return whole
        whole = await self._sampled(answering, sampling, session)
        self.turns.keep(answering.prompt_ids, sampling, whole, ends)
        return whole

    async def _sampled(self, answering: Answering, sampling: Sampling, session: str) -> Completion:
        """A completion by the engine.

        Engines do not see text, so an answer with stop texts is sampled in pieces, and the tokens after its end are
        dropped. The end depends only on the tokens before it, so that the kept ones keep their distribution.
        """
        whole, left = Completion((), (), (), FinishReason.LENGTH), sampling
        text, prompt_ids = answering.text, answering.prompt_ids
        piece = FIRST_PIECE if text.watches else sampling.max_tokens
        while True:
            asked = replace(left, max_tokens=min(left.max_tokens, piece))
            (more,) = await self.engine.generate(
                prompt_ids + whole.token_ids, asked, priority=self.priority, session=session
            )
            _check_whole(more.finish_reason)
            whole = whole.then(more)
            rest = sampling.rest(len(whole.token_ids))
            is_last = len(more.token_ids) < asked.max_tokens or more.finish_reason is FinishReason.STOP or rest is None
            size = 4 * len(whole.token_ids)
            await self.context.computed(size, text.add, more.token_ids, last=is_last)
            if text.stopped:
                return _cut(whole, await self.context.computed(size, text.kept), len(prompt_ids))
            if rest is None or is_last:
                return whole
            left, piece = rest, 2 * piece


@dataclass(frozen=True, slots=True)
class UntrainedSampler:
    """Implements `AnswerSampler` with a model server: tokens may be streamed, and the logits may have rules.

    Logprobs are those of the model itself; its weights are Version 0. A client that disconnects ends its answer.
    """

    context: SessionContext
    server: ModelServer
    is_trained = False

    async def completion(
        self, answering: Answering, ask: AnswerRequest, sampling: Sampling, session: str
    ) -> Completion:
        """Implements `AnswerSampler`."""
        text, prompt_ids = answering.text, answering.prompt_ids
        if ask.scores_prompt and len(prompt_ids) > 1:
            answering.scored = tuple(await self.server.prompt_logprobs(prompt_ids, ask.rules.top))
        if not ask.samples:
            return Completion((), (), (), FinishReason.LENGTH)
        ids, logprobs, tops = list[int](), list[float](), list[tuple[tuple[int, float], ...]]()
        answering.token_ids, answering.logprobs, answering.tops = ids, logprobs, tops
        every = 1 if ask.streams else EVERY if text.watches else 0
        async with aclosing(self.server.stream(prompt_ids, sampling, ask.rules, every=every)) as stream:
            async for new in stream:
                _check_whole(new.finish_reason)
                more = [one.id for one in new.tokens]
                ids += more
                logprobs += [min(one.logprob, 0.0) for one in new.tokens]
                tops += [one.top for one in new.tokens]
                size = 4 * len(ids) if text.parses else 0
                await self.context.computed(size, text.add, more, last=new.finish_reason is not None)
                reason = FinishReason.STOP if text.stopped else new.finish_reason
                if reason is not None:
                    break
                if ask.streams:
                    answering.news.put_nowait(answering)
        if text.stopped:
            kept, shown = await self.context.computed(4 * len(ids), lambda: (text.kept(), text.shown()))
            answering.hidden = kept - shown
            del ids[kept:], logprobs[kept:], tops[kept:]
        return Completion(tuple(ids), tuple(logprobs), (0,) * len(ids), reason or FinishReason.LENGTH)


def _check_whole(reason: FinishReason | None) -> None:
    if reason is FinishReason.ABORT:
        raise EngineUnavailable("the engine aborted the answer")


def _cut(whole: Completion, size: int, prompt: int) -> Completion:
    """First `size` tokens of a completion, which end in a stop text; `prompt` is the number of prompt tokens."""
    experts = len(whole.routing) // max(1, prompt + len(whole.token_ids) - 1)
    return Completion(
        whole.token_ids[:size],
        whole.logprobs[:size],
        whole.versions[:size],
        FinishReason.STOP,
        whole.routing[: experts * (prompt + size - 1)],
        tuple(index for index in whole.forced if index < size),
        whole.kept[:size],
    )
