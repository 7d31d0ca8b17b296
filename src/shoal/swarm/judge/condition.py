"""How a judged node is trained, and what came of one challenge."""

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """What the comparison sets against each other."""

    SWARM = "swarm"
    SOLO = "solo"


@dataclass(frozen=True, slots=True)
class Judged:
    """The score of one challenge, 0..1, taken by a node after so many of its rounds."""

    node: str
    arm: Condition
    round: int
    score: float
