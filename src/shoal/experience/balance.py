"""Which of the groups on offer a step trains: the oldest of each task, and of each task what it is due. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.types import Group

PATIENCE_S = 30.0
"""How long training waits, once, for a task that is due a group and has none. Then it goes on with what there is, until
that task delivers again."""
CLOCK_S = 1e-3
"""Timers and clocks agree to this: a wait that ends sooner has ended."""
ROUNDING = 1e-9
"""Of groups: sums of shares are not exact."""

Due: TypeAlias = Callable[[Mapping[str, int], int], Mapping[str, float]]
"""Given how many groups of each task were used, and how many are to be used next: how many of each present task may
have been used then. The sum over the present tasks is what they have used and those to be used next."""


@dataclass(frozen=True, slots=True, order=True)
class WaitingGroup:
    """One group on offer. The order is that of consumption within a task, and `shoal audit` checks it from the log."""

    oldest_version: int
    finished_seq: int
    group: Group

    @property
    def service(self) -> str:
        """The task it is of."""
        return self.group.task.service

    @property
    def newest_version(self) -> int:
        """Of the drawn tokens; the admitted version when nothing was drawn."""
        drawn = (turn.completion.versions for rollout in self.group.rollouts for turn in rollout.turns)
        return max((versions[-1] for versions in drawn if versions), default=self.group.admitted_version)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The groups that are trained next, or none; then `wait_s` says when to look again if nothing else happens."""

    groups: tuple[WaitingGroup, ...] = ()
    wait_s: float | None = None


class Balance:
    """Keeps the mix of what is trained at what tasks are due, which the mix of what finishes is not: a fast task is
    ahead by all that it may have waiting, a slow one behind by all that it has running.

    Invariants: no task is ahead of what it is due by a whole group; what it is behind it gets first, as it delivers.
    Nobody waits for a task that is away, nor longer than `PATIENCE_S` for one that delivers nothing.
    """

    def __init__(self) -> None:
        self.due: Due | None = None
        """None: the oldest groups of all come first."""
        self._missed_since_s: dict[str, float] = {}

    def delivered(self, service: str) -> None:
        """A group of a task is on offer."""
        self._missed_since_s.pop(service, None)

    def next(self, waiting: Sequence[WaitingGroup], n: int, used: Mapping[str, int], now_s: float) -> BatchChoice:
        """The next `n` of `waiting`, which are in order; `used` counts the groups that each task had trained."""
        if len(waiting) < n:
            return BatchChoice()
        if self.due is None:
            return BatchChoice(tuple(waiting[:n]))
        due = self.due(used, n)
        taken = Counter(used)
        chosen: list[WaitingGroup] = []
        ahead: list[WaitingGroup] = []
        for one in waiting:
            if len(chosen) < n and (one.service not in due or taken[one.service] < due[one.service] - ROUNDING):
                taken[one.service] += 1
                chosen.append(one)
            else:
                ahead.append(one)
        if len(chosen) < n:
            missing = [name for name, groups in due.items() if taken[name] < groups - ROUNDING]
            wait_s = max((self._patience_left_s(name, now_s) for name in missing), default=0.0)
            if wait_s > CLOCK_S:
                return BatchChoice(wait_s=wait_s)
        return BatchChoice(tuple(chosen + ahead[: n - len(chosen)]))

    def _patience_left_s(self, service: str, now_s: float) -> float:
        return self._missed_since_s.setdefault(service, now_s) + PATIENCE_S - now_s
