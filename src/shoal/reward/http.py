"""JSON messages of the scorer's server and its clients."""

import msgspec

from shoal.checker import Spec
from shoal.types import Receipt, Reward, RewardStatus

MOST_BODY_BYTES = 64 << 20
MOST_ANSWERS = 4096


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /score: answers to one task, and the checker that scores them."""

    scorer: Spec
    answers: list[str]
    truth: str | None = None
    info: str = "{}"
    receipt: Receipt | None = None


class ScoredAnswer(msgspec.Struct, frozen=True):
    """The reward of one answer, as JSON."""

    value: float
    status: RewardStatus
    parts: list[tuple[str, float]]
    evidence: str
    is_repeatable: bool = True

    @property
    def reward(self) -> Reward:
        """The reward as a `types.Reward`."""
        return Reward(self.value, self.status, tuple(self.parts), self.evidence, self.is_repeatable)


class ScoreReply(msgspec.Struct, frozen=True):
    """One reward per answer, in order."""

    rewards: list[ScoredAnswer]


def reply_of(rewards: list[Reward]) -> ScoreReply:
    """The reply with these rewards."""
    return ScoreReply(
        [ScoredAnswer(one.value, one.status, list(one.parts), one.evidence, one.is_repeatable) for one in rewards]
    )
