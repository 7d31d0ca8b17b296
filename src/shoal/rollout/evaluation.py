"""Held-out questions: mean reward and share of full marks, sampled as in training and greedy."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean

from shoal.interfaces import Purpose, Runner
from shoal.types import RewardStatus, Task

CORRECT = 1.0 - 1e-9
"""Smallest full reward; reasoning-gym gives partial credit for near misses."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of equal questions, answered twice, without the answers that no scorer judged."""

    values: Mapping[str, float]
    """Values by the names of `metrics.EVAL_NAMES`; nan where no answer was scored."""
    failure: str
    """The most common reason of unscored answers; empty when all were scored."""


async def evaluation(tasks: Sequence[Task], runner: Runner) -> Evaluation:
    """Runs one rollout of each task sampled as in training, then one greedy."""
    values: dict[str, float] = {}
    unscored: Counter[str] = Counter()
    for name, purpose in (("sampled", Purpose.SAMPLED), ("greedy", Purpose.GREEDY)):
        marks: dict[str, list[float]] = defaultdict(list)
        answered = await asyncio.gather(*(runner.rollouts(task, 1, purpose) for task in tasks))
        for task, (rollout,) in zip(tasks, answered, strict=True):
            if rollout.reward.status is RewardStatus.SCORED:
                marks[task.service].append(rollout.reward.value)
            else:
                unscored[rollout.reason or rollout.reward.evidence] += 1
        every = [mark for own in marks.values() for mark in own]
        values |= {name: _full_marks(every), f"{name}_reward": fmean(every) if every else nan}
        values |= {f"{name}/{task}": _full_marks(own) for task, own in marks.items()}
    values |= {"questions": len(tasks), "unscored": unscored.total()}
    return Evaluation(values, next((reason for reason, _ in unscored.most_common(1)), ""))


def _full_marks(marks: Sequence[float]) -> float:
    """Share of the full marks; nan without marks."""
    return fmean(mark >= CORRECT for mark in marks) if marks else nan
