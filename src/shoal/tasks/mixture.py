"""Several environments as one, each with its share of the drawn tasks."""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

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
        exact = [Fraction(repr(float(weight))) for weight in weights]
        common = lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * common) for weight in exact]
        self._next = [(Fraction(1, 2 * weight), number, 0) for number, weight in enumerate(self._weights)]
        heapq.heapify(self._next)
        self._turns: list[tuple[int, int]] = []  # the first period, as far as it was needed

    def turn(self, index: int) -> tuple[int, int]:
        """The number of the environment of turn `index`, and its number of turns before."""
        periods, position = divmod(index, sum(self._weights))
        while len(self._turns) <= position:
            at, number, before = self._next[0]
            heapq.heapreplace(self._next, (at + Fraction(1, self._weights[number]), number, before + 1))
            self._turns.append((number, before))
        number, before = self._turns[position]
        return number, periods * self._weights[number] + before

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`, which names its own environment. Raises `TaskError`."""
        number, own_index = self.turn(index)
        return self.services[number].draw(split, own_index)
