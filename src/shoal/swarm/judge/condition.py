"""A judged node trains under a condition, and each challenge gives it a score."""

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """Training of a compared node."""

    SWARM = "swarm"
    SOLO = "solo"


@dataclass(frozen=True, slots=True)
class Judged:
    """Score of one challenge, 0..1, after `round` training rounds of a node."""

    node: str
    arm: Condition
    round: int
    score: float
