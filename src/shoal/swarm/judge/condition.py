"""How a judged node is trained."""

from enum import StrEnum


class Arm(StrEnum):
    """What the comparison sets against each other."""

    SWARM = "swarm"
    SOLO = "solo"
