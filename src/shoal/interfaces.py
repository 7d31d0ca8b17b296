"""The seams of Shoal, most of them Protocols. Whatever stands behind one can be replaced; tests fake only these."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shoal.types import Completion, FinishReason, Group, Message, Outcome, Reward, Rollout, Sampling, Split, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Figures that an engine reports of itself."""

    version: int
    """The Version of the weights being served."""
    checksum: str
    """Of the weight bytes being served, as `weights.checksum` computes it; empty when the engine cannot tell."""
    max_model_len: int
    """The most tokens, prompt and answer together, that one sequence may have."""
    busy_share: float
    """Share of the time since the last call of `info` that was spent computing, 0..1."""
    tokens_drawn: int
    """Since the engine started."""
    tokens_prefilled: int
    """Since the engine started; includes what interruptions made it compute again."""
    interruptions: int
    """Weight updates that found sequences running."""
    running: int
    """Sequences being decoded now."""
    waiting: int
    """Sequences queued now."""
    foreign: bool = False
    """Whether a server of another project samples, which also ends answers by its own rules."""


class Engine(Protocol):
    """Turns token ids into token ids under known weights."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        """Draws `n` completions of one prompt; higher priority goes first.

        Calls of one `session` share a beginning: where there are many engines, one should have them all.

        Raises `RequestRefused` for a request that can never work, `EngineUnavailable` otherwise.
        """

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs in nats at temperature 1 of tokens 1..L-1 given those before them: L - 1 numbers."""

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the weights at `path` as `version`; running answers go on under them."""

    async def info(self) -> EngineInfo:
        """What the engine is doing."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rules that a client of a model server may ask of the logits; training never does: no loss would know them."""

    top: int = 0
    """Number of most likely tokens reported beside each token."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer already has, once."""
    frequency_penalty: float = 0.0
    """Taken from the logit of every token that the answer already has, for each time."""
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""


@dataclass(frozen=True, slots=True)
class ServedToken:
    """A token of a prompt or an answer, with logprobs under the model itself: temperature 1, before any rule."""

    id: int
    logprob: float
    """Nats."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their logprobs, most likely first."""


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Next tokens of an answer; the last ones have a finish reason."""

    tokens: tuple[ServedToken, ...]
    finish_reason: FinishReason | None = None


class ModelServer(Protocol):
    """An engine that answers clients without sessions, whose answers are never trained on."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, rules: LogitRules, *, every: int
    ) -> AsyncGenerator[ServedTokens, None]:
        """Tokens of one answer, at least `every` at a time until the last; 0 gives them all at once.

        Leaving the iterator aborts the answer. Raises `RequestRefused` or `EngineUnavailable`.
        """

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int) -> list[ServedToken]:
        """Tokens 1..L-1 given those before them, each with the `top` most likely tokens at its place."""


class Model(Protocol):
    """The model of a rollout: call `answer`, or give the URL and the key to any client of OpenAI or Anthropic."""

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients."""

    @property
    def anthropic_base_url(self) -> str:
        """URL for Anthropic's clients."""

    @property
    def api_key(self) -> str:
        """The session's key."""

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The model's next message; `tools` is a JSON array. Raises a `SessionError` or an `EngineError`."""

    def openai(self) -> "AsyncOpenAI":
        """Client of OpenAI that speaks in this session; all sessions of a process share its connections."""


class Environment:
    """An environment draws tasks of one kind, and may hold their conversations and score their answers itself."""

    name: str
    """Unique within a run."""
    notes: Sequence[str] = ()
    """Sentences about questions that are left out."""

    @property
    def converses(self) -> bool:
        """True if `rollout` holds the conversation; otherwise the run asks the model once."""
        return False

    @property
    def scores(self) -> bool:
        """True if `score` scores; otherwise an outcome has its reward, or the task names a checker."""
        return False

    @property
    def timeout_s(self) -> float:
        """Seconds that one rollout may take."""
        return 300.0

    @property
    def max_running(self) -> int | None:
        """Number of rollouts at once; None leaves it to the run."""
        return None

    def check(self) -> None:
        """Raises a `ShoalError` when this machine lacks something that the environment needs."""

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; equal arguments give equal tasks, and the splits share no question."""
        raise NotImplementedError

    async def drawn(self, split: Split, index: int) -> Task:
        """The task at `index`, without blocking the event loop."""
        return await asyncio.to_thread(self.draw, split, index)

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Works on a task with the model until it is done. Any exception makes a failed rollout."""
        raise NotImplementedError

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order; a failure is a status."""
        raise NotImplementedError


class Purpose(StrEnum):
    """Purpose of a rollout, which says how its tokens are sampled. Evaluation goes first at the engine."""

    TRAIN = "train"
    SAMPLED = "sampled"
    """Held out, sampled as in training."""
    GREEDY = "greedy"
    """Held out, the most likely token each time."""


class Runner(Protocol):
    """Runs rollouts of a task: in one turn, or by an agent that speaks with the model for as long as it likes."""

    async def rollouts(self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
        """The `n` rollouts of a task. What goes wrong is a rollout's status and reason, never an exception."""


class Scorer(Protocol):
    """Scores answers. Never raises for an answer's sake: what goes wrong is a `RewardStatus`."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""


class Renderer(Protocol):
    """Messages to tokens and back, for one chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation up to and including the header of the assistant's turn."""

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message:
        """The message that was sampled after a prompt: what was thought, and what was answered."""

    def completion_ids(self, text: str, prompt_ids: Sequence[int]) -> list[int] | None:
        """The tokens of a text with its thought, but for the stop token; None when they would not read back."""


class Exchange(Protocol):
    """Carries frames between the members of a swarm. It may lose, repeat and forge them, and it may be away."""

    @property
    def connected(self) -> bool:
        """Whether anybody can be reached now."""

    @property
    def failure(self) -> str:
        """Why nobody could be reached when it was tried last, or what is wrong there; empty before the first try."""

    async def publish(self, kind: str, author: str, frame: bytes) -> None:
        """Gives a frame to everybody. Raises `ExchangeUnavailable` when it cannot be handed over now."""

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and gives up to `most`, oldest first; waits for ever while the exchange is away.

        Who joins late gets what is still kept of the time before.
        """


class Attachments(Protocol):
    """Keeps bytes beside the frames of a swarm, by a digest that the caller checks."""

    async def attach(self, digest: str, data: bytes) -> None:
        """Keeps bytes under a digest. Raises `ExchangeUnavailable`."""

    async def fetch(self, digest: str, most_bytes: int) -> bytes | None:
        """The bytes kept under a digest; None where they are missing or too many. Raises `ExchangeUnavailable`."""


class WholeExchange(Exchange, Attachments, Protocol):
    """Carries frames and attachments: all that a training run needs of a swarm's transport."""


Logprobs: TypeAlias = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[Sequence[float]]]]
"""Rows of L tokens -> L - 1 logprobs each (nats, at the rollout temperature) under the weights being trained."""


class Swarm(Protocol):
    """The swarm as a training run sees it: a place to offer groups and to take groups of peers."""

    async def run(self) -> None:
        """Exchanges messages with peers for ever."""

    def offer(self, group: Group) -> None:
        """Takes a finished own group, which may be shared. Returns at once."""

    async def take(self, version: int, logprobs: Logprobs) -> list[Group]:
        """Chooses groups and encodes them under the weights being trained, whose newest Version is `version`."""

    def stepped(self, external: Sequence[Group]) -> dict[str, float]:
        """Records a step and returns its metrics."""
