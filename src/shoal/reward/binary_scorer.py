"""Rewards seen as right or wrong."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.interfaces import Scorer
from shoal.types import Reward, RewardStatus, Task

FULL = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class BinaryScorer:
    """A scorer under which answers to some services' tasks are worth 1 for a full score and 0 for anything less.

    Many reasoning-gym scorers give a little for any answer, or for one that looks right; where the answers of a group
    differ in that only, it would be the only thing learned. The score itself stays in `Reward.parts`.
    """

    scorer: Scorer
    services: Collection[str]

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        rewards = await self.scorer.score(task, answers)
        return [_marked(reward) for reward in rewards] if task.service in self.services else rewards


def _marked(reward: Reward) -> Reward:
    if reward.status is not RewardStatus.SCORED:
        return reward
    return replace(reward, value=float(reward.value >= FULL), parts=(*reward.parts, ("score", reward.value)))
