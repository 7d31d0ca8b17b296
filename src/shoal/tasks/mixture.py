"""Several task services as one, each with its share of the drawn tasks."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from shoal.errors import TaskError
from shoal.interfaces import TaskService
from shoal.types import Split, Task


class Interleaving:
    """Picks the next service by weight: over any prefix each service has its exact share within one turn.

    The chairman assignment of Tijdeman (1980) works on the services whose count is below their share by at least 1 /
    (2n - 2) after this turn. It picks the service that would first be a whole turn behind. No prefix is off by more
    than 1 - 1 / (2n - 2); "largest deficit first" has no such bound. Weights are whole numbers, and so is all
    arithmetic; after sum(weights) turns the pattern repeats.

        >>> [Interleaving([2, 1]).turn(index) for index in range(4)]
        [(0, 0), (1, 0), (0, 1), (0, 2)]
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = tuple(weights)
        self._period = sum(weights)
        self._counts = [0] * len(weights)
        self._turns: list[tuple[int, int]] = []  # the first period, as far as it was needed

    def turn(self, index: int) -> tuple[int, int]:
        """The service of turn `index`, and its number of turns before."""
        periods, position = divmod(index, self._period)
        while len(self._turns) <= position:
            self._extend()
        service, own_index = self._turns[position]
        return service, periods * self._weights[service] + own_index

    def _extend(self) -> None:
        services = range(len(self._weights))
        slack = max(2 * len(self._weights) - 2, 1)
        turn = len(self._turns) + 1
        deficit = [slack * (self._weights[i] * turn - self._counts[i] * self._period) for i in services]
        behind = [i for i in services if deficit[i] >= self._period]
        service = min(behind, key=lambda i: Fraction((slack - 1) * self._period - deficit[i], self._weights[i]))
        self._turns.append((service, self._counts[service]))
        self._counts[service] += 1


class Mixture:
    """Interleaves task services by weight, deterministically; itself a task service."""

    def __init__(self, services: Sequence[TaskService], weights: Sequence[float]) -> None:
        """Weights are relative. Raises `TaskError` unless every service has a weight > 0."""
        if not services or len(services) != len(weights) or min(weights) <= 0:
            raise TaskError(f"a mixture needs a weight > 0 for each service, got {list(weights)} for {len(services)}")
        exact = [Fraction(repr(float(weight))) for weight in weights]
        common = lcm(*(weight.denominator for weight in exact))
        self.services = tuple(services)
        self._interleaving = Interleaving([int(weight * common) for weight in exact])

    @property
    def name(self) -> str:
        """The mixture's name; a task carries the name of its own service."""
        return "mixture"

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`: pure, like the services' own. Raises `TaskError`."""
        service, own_index = self._interleaving.turn(index)
        return self.services[service].draw(split, own_index)
