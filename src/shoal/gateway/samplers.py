"""Samplers of a session: engines whose tokens are trained, or a model server whose tokens are not."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from shoal.errors import EngineUnavailable
from shoal.gateway.answer_text import AnswerText
from shoal.gateway.token_tree import Generation
from shoal.interfaces import Engine, FinishedTurns, ModelServer, ServedToken
from shoal.types import Completion, FinishReason, Sampling

if TYPE_CHECKING:
    from shoal.gateway.answer_request import AnswerRequest, SessionContext

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
        self, answering: Answering, ask: "AnswerRequest", sampling: Sampling, session: str
    ) -> Completion:
        """Samples an answer up to its stop token, stop text or first call, and reads its text.

        `session` is the session's token. Raises an `EngineError`.
        """


@dataclass(frozen=True, slots=True)
class TrainedSampler:
    """Implements `AnswerSampler` with engines that record logprobs and Versions as sampled."""

    context: "SessionContext"
    engine: Engine
    priority: int = 0
    turns: FinishedTurns | None = None
    """Takes finished turns; those of a killed run are answered from it."""
    is_trained = True

    async def completion(
        self, answering: Answering, ask: "AnswerRequest", sampling: Sampling, session: str
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

    context: "SessionContext"
    server: ModelServer
    is_trained = False

    async def completion(
        self, answering: Answering, ask: "AnswerRequest", sampling: Sampling, session: str
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
