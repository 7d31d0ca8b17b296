"""Held-out questions: mean reward and share of full marks, sampled as in training and greedy."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean

from shoal.interfaces import Purpose, Runner
from shoal.types import RewardStatus, Rollout, Task

CORRECT = 1.0 - 1e-9
"""Smallest full reward; reasoning-gym gives partial credit for near misses."""
_SCORED = RewardStatus.SCORED


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of equal questions, answered twice, without the answers that no scorer judged."""

    values: Mapping[str, float]
    """Values by the names of `metrics.EVAL_NAMES`; nan where no answer was scored."""
    failure: str
    """The most common reason of unscored answers; empty when all were scored."""
    rollouts: Sequence[tuple[Task, Purpose, tuple[Rollout, ...]]] = ()
    """All rollouts by question, first those sampled as in training, then the greedy ones."""


async def evaluation(tasks: Sequence[Task], runner: Runner, samples: int = 1) -> Evaluation:
    """Runs `samples` rollouts of each task sampled as in training, then one greedy."""
    values: dict[str, float] = {}
    unscored: Counter[str] = Counter()
    every_rollout: list[tuple[Task, Purpose, tuple[Rollout, ...]]] = []
    for name, purpose, n in (("sampled", Purpose.SAMPLED, samples), ("greedy", Purpose.GREEDY, 1)):
        marks: dict[str, list[float]] = defaultdict(list)
        best: list[float] = []
        answered = await asyncio.gather(*(runner.rollouts(task, n, purpose) for task in tasks))
        for task, rollouts in zip(tasks, answered, strict=True):
            own = [rollout.reward.value for rollout in rollouts if rollout.reward.status is _SCORED]
            marks[task.service] += own
            best += [max(own)] if own else []
            unscored.update(one.reason or one.reward.evidence for one in rollouts if one.reward.status is not _SCORED)
            every_rollout.append((task, purpose, rollouts))
        every = [mark for own in marks.values() for mark in own]
        values |= {name: _full_marks(every), f"{name}_reward": fmean(every) if every else nan}
        values |= {f"{name}/{task}": _full_marks(own) for task, own in marks.items()}
        if n > 1:
            values["pass_at_k"] = _full_marks(best)
    values |= {"questions": len(tasks), "unscored": unscored.total()}
    return Evaluation(values, next((reason for reason, _ in unscored.most_common(1)), ""), every_rollout)


def _full_marks(marks: Sequence[float]) -> float:
    """Share of the full marks; nan without marks."""
    return fmean(mark >= CORRECT for mark in marks) if marks else nan
