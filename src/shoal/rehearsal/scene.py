"""Values of a rehearsal: the scene that goes in, what comes out, and its figures."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

from shoal.config import Config
from shoal.observe.metrics import Record, number
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
        """Expected seconds in which engines sample the answers of a step, as many at once as may be."""
        ahead = self.rollouts * (1 + self.config.asynchrony.max_staleness)
        running = min(self.engine.places, -(-ahead // self.engines))
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


USD_PER_GPU_HOUR = {"a100": 1.5, "h100": 2.5, "h800": 2.5, "h20": 1.5, "h200": 3.5, "b200": 5.0, "l40s": 0.9}
"""Round prices for estimates, which no source guarantees; `--usd-per-gpu-hour` replaces them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the steps after the first ones, in which the buffer fills."""

    steps: int
    hours: float
    step_s: float
    """Mean seconds of a step."""
    step_s_90: tuple[float, float]
    """Range of nine tenths of the steps."""
    tokens_per_s: float
    """Sampled tokens of trained answers."""
    engines_idle: float
    """Share of the time in which engines sampled nothing."""
    trainer_idle: float
    staleness_mean: float
    staleness: dict[int, float]
    """Share of the trained groups by Versions of staleness."""
    dropped_groups: int
    dropped_for: dict[str, int]
    wasted_share: float
    """Share of the sampled tokens in groups that were dropped or are not trained yet, or in lost answers."""
    computed_again_per_token: float
    """Tokens of prompts and interrupted answers that engines computed, per sampled token."""
    waits_for_groups_s: float
    train_s: float
    write_s: float
    load_s: float
    interruptions: int
    usd_per_hour: float
    usd: float
    usd_per_million_tokens: float


def figures_of(scene: Scene, seen: Rehearsed, gpus: int = 0, usd_per_gpu_hour: float = 0.0) -> Figures:
    """Figures of a rehearsal on so many GPUs. Raises `ValueError` for a rehearsal without a step."""
    if not seen.steps:
        raise ValueError("no step ended in the rehearsed time; rehearse more hours")
    first = min(scene.config.asynchrony.max_staleness + 1, len(seen.steps) // 2)
    steps = seen.steps[first:]

    def mean(name: str) -> float:
        return fmean(number(step, name, 0.0) for step in steps)

    seconds = sorted(number(step, "step_s") for step in steps)
    rate = sum(number(step, "tokens_per_s") * number(step, "step_s") for step in steps) * _unit(scene, steps)
    tokens_per_s = rate / sum(seconds)
    hours, usd_per_hour = seen.seconds / 3600, gpus * usd_per_gpu_hour
    trained = tokens_per_s * sum(number(step, "step_s") for step in seen.steps)
    return Figures(
        len(seen.steps),
        hours,
        fmean(seconds),
        (seconds[int(0.05 * len(seconds))], seconds[min(int(0.95 * len(seconds)), len(seconds) - 1)]),
        tokens_per_s,
        1 - seen.engine_busy_s / (seen.seconds * scene.engines),
        1 - mean("trainer_busy"),
        mean("staleness_mean"),
        _staleness(steps),
        sum(seen.dropped.values()),
        seen.dropped,
        max(1 - trained / max(seen.sampled_tokens, 1), 0.0),
        seen.computed_again / max(seen.sampled_tokens, 1),
        mean("groups_wait_s"),
        mean("train_s"),
        mean("write_s"),
        median(number(step, "load_s", 0.0) for step in steps),
        seen.interruptions,
        usd_per_hour,
        usd_per_hour * hours,
        1e6 * usd_per_hour / (3600 * tokens_per_s),
    )


def _unit(scene: Scene, steps: list[Record]) -> float:
    """Tokens of the model per id of the metrics: planned lengths over ids."""
    return scene.mean_tokens / fmean(number(step, "length_mean") for step in steps)


def _staleness(steps: list[Record]) -> dict[int, float]:
    """Shares of groups by staleness."""
    counts: Counter[int] = Counter()
    for step in steps:
        for name, count in step.items():
            if name.startswith("staleness/") and count:
                counts[int(name.partition("/")[2])] += int(float(count))
    return {versions: count / counts.total() for versions, count in sorted(counts.items())}
