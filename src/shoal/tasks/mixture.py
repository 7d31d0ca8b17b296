"""Several environments as one, each with its share of the drawn tasks."""

import heapq
from collections.abc import Sequence
from fractions import Fraction

from shoal.errors import TaskError
from shoal.interfaces import Environment
from shoal.types import Split, Task


class Mixture(Environment):
    """Interleaves environments by weight, deterministically: a weighted round robin.

    Turn `n` of an environment with weight `w` is at `(n + 1/2) / w`, and turns go in that order. After any number of
    turns each count is `w` times one common number, rounded.
    """

    name = "mixture"

    def __init__(self, services: Sequence[Environment], weights: Sequence[float]) -> None:
        """Weights are relative. Raises `TaskError` unless every environment has a weight > 0."""
        if not services or len(services) != len(weights) or min(weights) <= 0:
            raise TaskError(f"a mixture needs a weight > 0 for each service, got {list(weights)} for {len(services)}")
        self.services = tuple(services)
        self._pace = [1 / Fraction(repr(float(weight))) for weight in weights]
        self._next = [(pace / 2, number, 0) for number, pace in enumerate(self._pace)]
        heapq.heapify(self._next)
        self._turns: list[tuple[int, int]] = []  # as far as they were needed

    def turn(self, index: int) -> tuple[int, int]:
        """The number of the environment of turn `index`, and its number of turns before."""
        while len(self._turns) <= index:
            at, number, before = self._next[0]
            heapq.heapreplace(self._next, (at + self._pace[number], number, before + 1))
            self._turns.append((number, before))
        return self._turns[index]

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`, which names its own environment. Raises `TaskError`."""
        number, own_index = self.turn(index)
        return self.services[number].draw(split, own_index)
