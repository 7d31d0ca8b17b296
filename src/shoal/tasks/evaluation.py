"""Accuracy on held-out questions, sampled as in training and greedy."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.tasks.rollout import SingleTurn
from shoal.types import RewardStatus, Sampling, Task

PRIORITY = 1
CORRECT = 1.0 - 1e-9
"""reasoning-gym gives partial credit for near misses; only a full reward counts as correct."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How many of the questions were answered correctly, as shares of those that were scored."""

    overall: float
    by_task: Mapping[str, float]
    questions: int
    failed: int
    """Answers that no scorer judged; they are not in the shares."""


async def accuracy(tasks: Sequence[Task], desk: SingleTurn, sampling: Sampling) -> Accuracy:
    """One answer to each task; they go before training's requests, so that evaluation is short."""
    desk = replace(desk, sampling=sampling, priority=PRIORITY)
    values = await asyncio.gather(*(_correct(desk, task) for task in tasks))
    by_task: dict[str, list[bool]] = defaultdict(list)
    for task, value in zip(tasks, values, strict=True):
        if value is not None:
            by_task[task.service].append(value)
    scored = [value for value in values if value is not None]
    return Accuracy(
        overall=sum(scored) / len(scored) if scored else 0.0,
        by_task={name: sum(hits) / len(hits) for name, hits in by_task.items()},
        questions=len(tasks),
        failed=len(tasks) - len(scored),
    )


async def _correct(desk: SingleTurn, task: Task) -> bool | None:
    (rollout,) = await desk.rollouts(task, 1)
    if rollout.reward.status is not RewardStatus.SCORED:
        return None
    return rollout.reward.value >= CORRECT


async def accuracies(tasks: Sequence[Task], desk: SingleTurn) -> tuple[Accuracy, Accuracy]:
    """Accuracy sampled as `desk` samples, and greedy."""
    sampled = await accuracy(tasks, desk, desk.sampling)
    return sampled, await accuracy(tasks, desk, replace(desk.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0))
