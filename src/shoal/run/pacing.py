"""Time that a run spends beside training: when checkpoints are due, and evaluations that cost more than training."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

EARLY_S = 120.0
"""Seconds without a checkpoint after which a step's end writes one, however many steps are to come."""
TIMES_SAVING = 20.0
"""Multiple of the seconds of one checkpoint that passes until time alone makes the next one due."""


@dataclass(slots=True)
class CheckpointDue:
    """Rule of checkpoints: after every so many steps, and sooner where steps are slow and saving is not."""

    every_steps: int
    clock: Callable[[], float] = time.monotonic
    _saved_s: float = field(init=False)
    _took_s: float = 0.0

    def __post_init__(self) -> None:
        self._saved_s = self.clock()

    def after(self, step: int) -> bool:
        """Tells whether a checkpoint is due at the end of a step, counted from 0."""
        waited_s = self.clock() - self._saved_s
        return (step + 1) % self.every_steps == 0 or waited_s >= max(EARLY_S, TIMES_SAVING * self._took_s)

    def saved(self, seconds: float) -> None:
        """Notes that a checkpoint's files were handed over just now, in so many seconds."""
        self._saved_s, self._took_s = self.clock(), seconds

    def sealed(self, seconds: float) -> None:
        """Adds the seconds that training then waited until the checkpoint was whole."""
        self._took_s += seconds


@dataclass(slots=True)
class EvaluationCost:
    """Comparison of the last evaluation's seconds with those of training between two; it tells once."""

    questions: int
    clock: Callable[[], float] = time.monotonic
    evaluation_s: float = 0.0
    told: bool = False
    _since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    def begin(self) -> None:
        """Notes that training begins."""
        self._since_s = self.clock()

    def trained(self, steps: int) -> str:
        """Notes that so many steps were trained since the last call. Returns the warning where it is due."""
        trained_s, self._since_s = self.clock() - self._since_s, self.clock()
        if self.told or self.evaluation_s <= trained_s:
            return ""
        self.told = True
        few = max(1, int(self.questions * trained_s / self.evaluation_s / 4))
        return (
            f"an evaluation takes {self.evaluation_s:.0f} s, more than the {trained_s:.0f} s of the {steps} steps "
            f"between two; set eval.questions to {few}, or eval.every_steps above {4 * steps}"
        )
