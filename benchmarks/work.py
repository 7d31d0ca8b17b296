"""Benchmarks ask questions that need no skill, and every group is informative."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.interfaces import Environment
from shoal.types import Message, Reward, Role, Split, Task, seed_for

GROUP_SIZE = 8


def coin(answer: str) -> float:
    """Scores 1 or 0 by the parity of a checksum of the answer.

    >>> coin("abc"), coin("abd")
    (0.0, 1.0)
    """
    return float(zlib.crc32(answer.encode()) & 1)


class CoinScorer:
    """Scorer that rewards half of all answers, so that every group is informative."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """Scores one coin per answer."""
        return [Reward(coin(answer)) for answer in answers]


def digits(index: int) -> str:
    """Digits that the question at `index` asks about."""
    return f"{seed_for('bench', index) % 10**8:08d}"


@dataclass(frozen=True, slots=True)
class DigitService(Environment):
    """Service that asks eight digits, others at every index."""

    name: str = "digits"

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        return Task(f"{split.value}-{index}", self.name, (Message(Role.USER, digits(index)),))
