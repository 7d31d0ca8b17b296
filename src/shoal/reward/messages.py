"""Messages of a scorer and its workers: a `Batch`, then the fault of its task, or "" and a `Reward` per answer."""

import msgspec

from shoal.checker import Spec
from shoal.types import EXHAUSTED, Reward, Task


class Batch(msgspec.Struct, frozen=True):
    """Answers to one task, and the checker that scores them."""

    spec: Spec
    task: Task
    answers: list[str]
    cpu_s: float = 0.0
    """Seconds of processor time of one answer."""


def exhausted(cpu_s: float) -> Reward:
    """Reward of an answer on which its checker used up its processor time."""
    return Reward(0.0, parts=((EXHAUSTED, 1.0),), evidence=f"more than {cpu_s:g} s of processor time")
