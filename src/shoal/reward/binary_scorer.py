"""Rewards of exactly 1 or 0."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.interfaces import Scorer
from shoal.types import Reward, RewardStatus, Task

FULL = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class BinaryScorer:
    """Wraps a scorer: a full score of some services' tasks gives 1, any other score gives 0.

    Many reasoning-gym scorers give a little for any answer, or for an answer in the right form. When the answers of a
    group differ in nothing else, training would learn only that. The score itself stays in `Reward.parts`.
    """

    scorer: Scorer
    services: Collection[str]

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        rewards = await self.scorer.score(task, answers)
        return [_binary(reward) for reward in rewards] if task.service in self.services else rewards


def _binary(reward: Reward) -> Reward:
    if reward.status is not RewardStatus.SCORED:
        return reward
    return replace(reward, value=float(reward.value >= FULL), parts=(*reward.parts, ("score", reward.value)))
