"""Accuracy on held-out questions, sampled as in training and greedy."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

from shoal.interfaces import Purpose, Runner
from shoal.types import RewardStatus, Task

CORRECT = 1.0 - 1e-9
"""reasoning-gym gives partial credit for near misses; only a full reward counts as correct."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How many of the questions were answered correctly, as shares of those that were scored."""

    overall: float
    """nan when no answer was scored."""
    by_task: Mapping[str, float]
    questions: int
    failed: int
    """Answers that no scorer judged; they are not in the shares."""


async def accuracy(tasks: Sequence[Task], runner: Runner, purpose: Purpose) -> Accuracy:
    """One rollout of each task."""
    values = await asyncio.gather(*(_correct(runner, task, purpose) for task in tasks))
    by_task: dict[str, list[bool]] = defaultdict(list)
    for task, value in zip(tasks, values, strict=True):
        if value is not None:
            by_task[task.service].append(value)
    scored = [value for value in values if value is not None]
    return Accuracy(
        overall=sum(scored) / len(scored) if scored else nan,
        by_task={name: sum(hits) / len(hits) for name, hits in by_task.items()},
        questions=len(tasks),
        failed=len(tasks) - len(scored),
    )


async def _correct(runner: Runner, task: Task, purpose: Purpose) -> bool | None:
    (rollout,) = await runner.rollouts(task, 1, purpose)
    if rollout.reward.status is not RewardStatus.SCORED:
        return None
    return rollout.reward.value >= CORRECT


async def accuracies(tasks: Sequence[Task], runner: Runner) -> tuple[Accuracy, Accuracy]:
    """Accuracy sampled as in training, and greedy."""
    return await accuracy(tasks, runner, Purpose.SAMPLED), await accuracy(tasks, runner, Purpose.GREEDY)
