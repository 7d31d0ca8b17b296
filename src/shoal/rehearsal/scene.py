"""Values of a rehearsal: the scene that goes in, and what comes out."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.config import Config
from shoal.observe.metrics import Record
from shoal.rehearsal.costs import EngineCost, TrainerCost
from shoal.rehearsal.engine import Length

UNITS_PER_ANSWER = 4
"""Ids of an answer of mean length, unless it has fewer tokens."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Interruptions of engines on spot machines."""

    every_s: float
    """Mean seconds between two interruptions of one engine."""
    back_s: float = 600.0
    """Seconds until a machine takes its place."""
    notice: bool = True
    """Whether the engine leaves before it ends, so that other engines continue its answers."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A run to be rehearsed."""

    config: Config
    engine: EngineCost
    engines: int
    trainer: TrainerCost
    length: Length
    mean_tokens: float
    """Mean of `length`."""
    prompt_tokens: int
    score_s: Callable[[random.Random], float] = lambda rng: 0.0
    scorers: int = 1
    solved: float = 0.5
    spot: Spot | None = None
    seconds: float | None = None
    """Virtual seconds after which the rehearsal stops; None runs all steps."""
    seed: int = 0

    @property
    def unit(self) -> int:
        """Tokens of the model per id."""
        return max(round(self.mean_tokens / UNITS_PER_ANSWER), 1)

    @property
    def rollouts(self) -> int:
        """Answers of a step."""
        return self.config.train.groups_per_step * self.config.rollout.group_size

    @property
    def sampling_s(self) -> float:
        """Expected seconds in which engines sample the answers of a step, with as many at once as they have places."""
        running = min(self.engine.places, -(-self.rollouts // self.engines))
        context = running * (self.prompt_tokens + self.mean_tokens / 2)
        step_s = self.engine.base_s(running) + context * self.engine.context_s
        return self.rollouts * self.mean_tokens * step_s / running / self.engines

    @property
    def training_s(self) -> float:
        """Expected seconds of the trainer's step, all of whose rows have an advantage."""
        return self.trainer.step_s([round(self.prompt_tokens + self.mean_tokens)] * self.rollouts)

    @property
    def step_s(self) -> float:
        """Expected seconds of a step: those of its slower side."""
        return max(self.sampling_s, self.training_s)


@dataclass(slots=True)
class Rehearsed:
    """Figures of a rehearsal."""

    records: list[Record] = field(default_factory=list)
    """Records of the run's metrics."""
    seconds: float = 0.0
    trained_tokens: int = 0
    """Tokens of the trained rows, prompts included."""
    sampled_tokens: int = 0
    computed_again: int = 0
    """Tokens of prompts and interrupted answers that engines computed."""
    engine_busy_s: float = 0.0
    interruptions: int = 0
    """Engines that a spot machine took away."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups that finished but were never trained, by reason."""

    @property
    def steps(self) -> list[Record]:
        """Records of training steps."""
        return [one for one in self.records if one["kind"] == "step"]
