"""Evaluations of a run on held-out questions, while it trains; their cost is compared with training."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import Config
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.interfaces import Runner
from shoal.observe.metrics import Trackers
from shoal.rollout.evaluation import evaluation
from shoal.types import Task


@dataclass(slots=True)
class EvaluationCost:
    """Comparison of the last evaluation's seconds with those of training between two; it warns once."""

    questions: int
    clock: Callable[[], float] = time.monotonic
    evaluation_s: float = 0.0
    warned: bool = False
    _since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    def begin(self) -> None:
        """Notes that training begins."""
        self._since_s = self.clock()

    def trained(self, steps: int) -> str:
        """Notes that so many steps were trained since the last call. Returns the warning where it is due."""
        trained_s, self._since_s = self.clock() - self._since_s, self.clock()
        if self.warned or self.evaluation_s <= trained_s:
            return ""
        self.warned = True
        few = max(1, int(self.questions * trained_s / self.evaluation_s / 4))
        return (
            f"an evaluation takes {self.evaluation_s:.0f} s, more than the {trained_s:.0f} s of the {steps} steps "
            f"between two; set eval.questions to {few}, or eval.every_steps above {4 * steps}"
        )


@dataclass(slots=True)
class HeldOutEvaluations:
    """Evaluations of one run; at most one runs at a time."""

    config: Config
    run_dir: Path
    tasks: Sequence[Task]
    runner: Runner
    trackers: Trackers
    values: list[Mapping[str, float]]
    """Values of each evaluation, those of earlier processes included."""
    clock: Callable[[], float] = time.monotonic
    cost: EvaluationCost = field(init=False)
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.cost = EvaluationCost(self.config.held_out_questions, self.clock)

    def start(self, steps_done: int, tasks: asyncio.TaskGroup) -> None:
        """Starts an evaluation in `tasks`, unless the one before still runs."""
        if self._running is None or self._running.done():
            self._running = tasks.create_task(self.run(steps_done), name="evaluation")

    async def ended(self) -> None:
        """Waits for the evaluation that is under way."""
        if self._running is not None:
            await self._running

    async def run(self, steps_done: int) -> None:
        """Answers the questions, sampled as in training and greedy, and records answers and values."""
        began_s, first = self.clock(), not self.values
        evaluated = await evaluation(self.tasks, self.runner, self.config.eval.samples, first=first)
        self.cost.evaluation_s = self.clock() - began_s
        answers = [
            HeldOutAnswer.of(steps_done, task, purpose, position, rollout)
            for task, purpose, rollouts in evaluated.rollouts
            for position, rollout in enumerate(rollouts)
        ]
        await asyncio.to_thread(write_answers, self.run_dir, steps_done, answers)
        self.values.append(evaluated.values)
        self.trackers.log_eval(steps_done, evaluated.values)
        self.trackers.log_answers(steps_done, evaluated.answers)
        if evaluated.failure:
            self.trackers.log_event("rollout_failed", reason=evaluated.failure)
