"""The number of groups at once, by the engine's load. Pure.

Rollouts that wait for tools leave the engine idle, so more of them should run than the engine has places. When requests
queue up, fewer should run. Both factors multiply: a limit that adds takes minutes to follow a changing load.
"""

from dataclasses import dataclass

GROWTH = 1.25
CUT = 0.8
IDLE_BELOW = 0.6
"""Share of the engine's places in use, below which more groups may run."""
QUEUED_ABOVE = 1.0
"""Waiting requests per place of the engine, above which fewer groups may run."""


@dataclass(slots=True)
class Concurrency:
    """Invariant: `floor <= limit <= ceiling`. The floor fills the engine with answers that wait for nothing."""

    floor: int
    ceiling: int
    limit: int = 0

    def __post_init__(self) -> None:
        self.limit = self.limit or self.floor
        assert 1 <= self.floor <= self.limit <= self.ceiling

    def looked(self, *, places: int, running: int, waiting: int, groups: int) -> int:
        """The limit after a look at the engine's `places` and requests, while `groups` are under way.

        >>> busy, idle = Concurrency(10, 100), Concurrency(10, 100)
        >>> busy.looked(places=64, running=64, waiting=3, groups=10), idle.looked(
        ...     places=64, running=20, waiting=0, groups=10)
        (10, 13)
        """
        if waiting > QUEUED_ABOVE * places:
            self.limit = max(int(self.limit * CUT), self.floor)
        elif waiting == 0 and running < IDLE_BELOW * places and groups >= self.limit:
            self.limit = min(int(self.limit * GROWTH) + 1, self.ceiling)
        return self.limit
