"""The seams of Shoal, most of them Protocols. Implementations can be replaced; tests fake only these."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from shoal.plugins import in_thread
from shoal.types import Completion, FinishReason, Group, Message, Outcome, Reward, Rollout, Sampling, Split, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Figures that an engine reports."""

    version: int
    """The Version of the weights being served."""
    checksum: str
    """Checksum of the served weights by `weights.checksum`; empty if the engine does not know it."""
    max_model_len: int
    """The most tokens, prompt and answer together, that one sequence may have."""
    busy_share: float
    """Share of the time since the last call of `info` that was spent computing, 0..1."""
    tokens_drawn: int
    """Since the engine started."""
    tokens_prefilled: int
    """Since the engine started; includes tokens computed again after interruptions."""
    interruptions: int
    """Weight updates that found sequences running."""
    running: int
    """Sequences being decoded now."""
    waiting: int
    """Sequences queued now."""
    foreign: bool = False
    """Whether another project's server samples; it also ends answers by its own rules."""


class Engine(Protocol):
    """Samples completions of token ids under known weights."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        """Draws `n` completions of one prompt; higher priority goes first.

        Calls of one `session` share a prefix, so that with several engines one should serve them all.

        Raises `RequestRefused` for a request that can never work, `EngineUnavailable` otherwise.
        """

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the weights at `path` as `version`; running answers continue under them."""

    async def info(self) -> EngineInfo:
        """The engine's current figures."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes of the logits that a client of a model server may ask for; never in training, as no loss models them."""

    top: int = 0
    """Number of most likely tokens to report at each position."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that occurs in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of every token for each of its occurrences in the answer."""
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and the numbers to add to their logits."""


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
        """Tokens of one answer, at least `every` at a time until the last; 0 yields them all at once.

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
        """OpenAI's client of this session; all sessions of a process share its connections."""


class Follower(Protocol):
    """Derives a state from a task's usable groups, in the order of the log, so that a resumed run has it again."""

    @property
    def memory(self) -> int:
        """Number of the newest groups on which the state depends."""

    def answered(self, group: Group) -> None:
        """Takes the next group."""

    def counts(self) -> Mapping[str, int]:
        """The state's figures by name."""


class Environment:
    """An environment draws tasks of one kind, and may hold their conversations and score their answers itself."""

    name: str
    """Unique within a run."""
    notes: Sequence[str] = ()
    """Sentences about omitted questions."""

    @property
    def questions(self) -> Sequence[Task]:
        """All training tasks, where they are a fixed set; empty where each index has a fresh question."""
        return ()

    @property
    def converses(self) -> bool:
        """True if `rollout` holds the conversation; otherwise the run asks the model once."""
        return False

    @property
    def scores(self) -> bool:
        """True if `score` scores answers; otherwise the outcome has a reward, or the task names a checker."""
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
        return await in_thread(self.draw, split, index)

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Works on a task with the model until it is done. Any exception makes a failed rollout."""
        raise NotImplementedError

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order; a failure is a status."""
        raise NotImplementedError


class Purpose(StrEnum):
    """Purpose of a rollout; it decides how tokens are sampled. Evaluation has priority at the engine."""

    TRAIN = "train"
    SAMPLED = "sampled"
    """Held out, sampled as in training."""
    GREEDY = "greedy"
    """Held out, the most likely token each time."""


class FinishedTurns(Protocol):
    """Finished turns of one rollout, by which a run that was killed goes on."""

    def take(self, prompt_ids: Sequence[int], sampling: Sampling, ends: Sequence[object] = ()) -> Completion | None:
        """A completion that an earlier process of the run sampled as asked; each is given once.

        Asked is the prompt, the sampling without its seed, and what else `ends` an answer.
        """

    def keep(
        self, prompt_ids: Sequence[int], sampling: Sampling, completion: Completion, ends: Sequence[object] = ()
    ) -> None:
        """Has a finished turn logged, without waiting."""

    def forget(self) -> None:
        """Gives up all turns, because the rollout begins again."""


TurnsOf: TypeAlias = Callable[[int], FinishedTurns]
"""Finished turns of a group's rollout, by its index."""


class Runner(Protocol):
    """Runs rollouts of a task: a single turn, or an agent with any number of turns."""

    async def rollouts(
        self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN, turns: TurnsOf | None = None
    ) -> tuple[Rollout, ...]:
        """The `n` rollouts of a task, which log `turns` where given and go on from those of a killed run.

        Failures become a rollout's status and reason, never an exception.
        """


class Scorer(Protocol):
    """Scores answers. An answer never causes an exception; failures become a `RewardStatus`."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""


class RewardFunction(Protocol):
    """A user's reward with TRL's signature, `reward(prompts, completions, **columns)`.

    Prompts and completions are conversations, lists of `{"role": ..., "content": ...}`; columns are lists of the rows'
    other values.
    """

    def __call__(self, *args: Any, **columns: Any) -> Sequence[float | None]:
        """One number for each completion; None is no reward."""


class Renderer(Protocol):
    """Messages to tokens and back, for one chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation up to and including the header of the assistant's turn."""

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message:
        """The message that was sampled after a prompt: its reasoning and its answer."""

    def completion_ids(self, text: str, prompt_ids: Sequence[int]) -> list[int] | None:
        """The tokens of a text with its thought, without the stop token; None if they would not decode to the text."""


class Exchange(Protocol):
    """Carries frames between the members of a swarm. It may lose, repeat and forge them, and it may be unreachable."""

    @property
    def connected(self) -> bool:
        """Whether the exchange can be reached now."""

    @property
    def failure(self) -> str:
        """Why the last try to reach the exchange failed, or its current fault; empty before the first try."""

    async def publish(self, author: str, frame: bytes) -> None:
        """Sends a frame to all members. Raises `ExchangeUnavailable` when it cannot be sent now."""

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and returns up to `most`, oldest first. While unreachable it waits without a limit.

        A late member also gets the earlier frames that are still kept.
        """

    async def receive_from(self, authors: frozenset[str], most: int) -> list[bytes]:
        """Waits a moment for frames that are sent under these names, past all others; returns up to `most`.

        `receive` leaves these frames out from then on. Some may come twice. A member can send under another's name.
        """


Logprobs: TypeAlias = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[Sequence[float]]]]
"""Rows of L tokens -> L - 1 logprobs each (nats, at the rollout temperature) under the weights being trained."""


class Worker(Protocol):
    """A process that answers calls: a child of this one, or a process of another host that has joined a run."""

    @property
    def ticks(self) -> int:
        """Processor time of the process, in ticks."""

    def place(self, folder: Path) -> str:
        """Path by which requests name a folder of this host."""

    async def call(
        self,
        frame: bytes,
        timeout_s: float,
        *,
        concurrent: bool = False,
        fetched: Path | None = None,
        filled: Path | None = None,
    ) -> bytes:
        """Answer to a frame. Raises `ChildDied`, and `TimeoutError` after which the process is gone.

        A `concurrent` call is answered while the worker serves others.

        The worker reads the files of the folder `fetched`, and writes files that are in `filled` with the answer.
        """

    async def died(self) -> object:
        """Waits until the process has ended; returns how."""
