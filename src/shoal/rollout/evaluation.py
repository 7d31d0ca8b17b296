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


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one answer to each question, without the answers that no scorer judged."""

    full_marks: float
    """Share of the answers whose reward is full; nan when no answer was scored."""
    reward: float
    """Mean reward; nan when no answer was scored."""
    by_task: Mapping[str, float]
    """Share of full marks of each task."""
    unscored: Mapping[str, int]
    """Number of unscored answers, by reason."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of equal questions, answered twice."""

    sampled: Scores
    greedy: Scores
    questions: int

    @property
    def values(self) -> dict[str, float]:
        """Values by the names of `metrics.EVAL_NAMES`."""
        return {
            "sampled": self.sampled.full_marks,
            "greedy": self.greedy.full_marks,
            "sampled_reward": self.sampled.reward,
            "greedy_reward": self.greedy.reward,
            "questions": self.questions,
            "unscored": sum(self._unscored.values()),
            **{f"sampled/{name}": value for name, value in self.sampled.by_task.items()},
            **{f"greedy/{name}": value for name, value in self.greedy.by_task.items()},
        }

    @property
    def failure(self) -> str:
        """The most common reason of unscored answers; empty when all were scored."""
        return next((reason for reason, _ in self._unscored.most_common(1)), "")

    @property
    def _unscored(self) -> Counter[str]:
        return Counter(self.sampled.unscored) + Counter(self.greedy.unscored)


async def evaluation(tasks: Sequence[Task], runner: Runner) -> Evaluation:
    """Runs one rollout of each task sampled as in training, then one greedy."""
    return Evaluation(
        await scores(tasks, runner, Purpose.SAMPLED), await scores(tasks, runner, Purpose.GREEDY), len(tasks)
    )


async def scores(tasks: Sequence[Task], runner: Runner, purpose: Purpose) -> Scores:
    """Runs one rollout of each task."""
    rollouts = [rollout for (rollout,) in await asyncio.gather(*(runner.rollouts(one, 1, purpose) for one in tasks))]
    scored = [(task, one) for task, one in zip(tasks, rollouts, strict=True) if _is_scored(one)]
    by_task: dict[str, list[bool]] = defaultdict(list)
    for task, rollout in scored:
        by_task[task.service].append(rollout.reward.value >= CORRECT)
    return Scores(
        full_marks=fmean(rollout.reward.value >= CORRECT for _, rollout in scored) if scored else nan,
        reward=fmean(rollout.reward.value for _, rollout in scored) if scored else nan,
        by_task={name: fmean(hits) for name, hits in by_task.items()},
        unscored=Counter(one.reason or one.reward.evidence for one in rollouts if not _is_scored(one)),
    )


def _is_scored(rollout: Rollout) -> bool:
    return rollout.reward.status is RewardStatus.SCORED
