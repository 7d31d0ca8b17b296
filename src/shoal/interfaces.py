"""The seams of Shoal, as Protocols. Whatever stands behind one can be replaced, and only these are faked in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.types import Completion, Message, Reward, Sampling, Split, Task


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself."""

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


class Engine(Protocol):
    """Turns token ids into token ids under known weights."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0
    ) -> list[Completion]:
        """Draws `n` completions of one prompt; higher priority goes first.

        Raises `RequestRefused` for a request that can never work, `EngineUnavailable` otherwise.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs in nats at temperature 1 of tokens 1..L-1 given those before them: L - 1 numbers."""
        ...

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the weights at `path` as `version`; running answers go on under them."""
        ...

    async def info(self) -> EngineInfo:
        """What the engine is doing."""
        ...


class TaskService(Protocol):
    """Draws tasks and says how answers to them are scored. Drawing is a pure function of (split, index)."""

    @property
    def name(self) -> str:
        """Unique within a run."""
        ...

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; equal arguments give equal tasks, and the splits share no question."""
        ...


class Scorer(Protocol):
    """Scores answers. Never raises for an answer's sake: what goes wrong is a `RewardStatus`."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        ...


class Renderer(Protocol):
    """Messages to tokens and back, for one chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn."""
        ...

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation up to and including the header of the assistant's turn."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """What was said, without special tokens."""
        ...


class Tracker(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""
        ...

    def close(self) -> None:
        """Writes what is pending."""
        ...
