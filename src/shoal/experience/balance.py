"""Picks the groups that a step trains, each task's oldest, as many as it is due, and records their use. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.experience.schema import ConsumedGroup
from shoal.types import Group, Sample

PATIENCE_S = 30.0
"""Seconds that training waits, once, for a task that is due a group and has none. Training then goes on with the other
groups, until that task delivers again.
"""
CLOCK_S = 1e-3
"""Seconds up to which timers and clocks agree: a wait that ends this much early has ended."""
ROUNDING = 1e-9
"""Tolerance in groups: sums of shares are not exact."""

Due: TypeAlias = Callable[[Mapping[str, int], int], Mapping[str, float]]
"""Number of groups of each present task that may have been used after the next choice.

It is a function of the number of used groups of each task, and of the number to choose. The sum over the present tasks
is their used groups plus the groups to choose.
"""


@dataclass(frozen=True, slots=True, order=True)
class WaitingGroup:
    """A group on offer. The order is the order of consumption within a task; `shoal audit` checks it from the log."""

    oldest_version: int
    finished_seq: int
    group: Group

    @property
    def service(self) -> str:
        """The group's task service."""
        return self.group.task.service

    @property
    def newest_version(self) -> int:
        """The newest Version of a sampled token; the admitted version without sampled tokens."""
        drawn = (turn.completion.versions for rollout in self.group.rollouts for turn in rollout.turns)
        return max((versions[-1] for versions in drawn if versions), default=self.group.admitted_version)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The groups to train next, or none; then `wait_s` is the time until the next look without other events."""

    groups: tuple[WaitingGroup, ...] = ()
    wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group being trained on."""

    waited: WaitingGroup
    version: int
    horizon: int

    def use(self, rows: Sequence[Sample], bound: int) -> ConsumedGroup:
        """The record of a use. The trainer masks tokens older than `bound` in `rows`.

        Masked tokens are counted in the rows and not derived from the bound, because the audit compares the two.
        """
        oldest: int | None = self.waited.oldest_version
        masked = 0
        if rows and self.waited.oldest_version < bound:
            drawn = [
                (version, advantage != 0)
                for row in rows
                for sampled, version, advantage in zip(row.mask, row.versions, row.advantages, strict=True)
                if sampled
            ]
            oldest = min((version for version, trained in drawn if trained), default=None)
            masked = sum(version < bound and not trained for version, trained in drawn)
        return ConsumedGroup(self.waited.finished_seq, self.horizon, oldest, masked)


class Balance:
    """Keeps the mix of trained groups at each task's due, although tasks finish groups in another mix.

    A fast task is ahead by its waiting groups, a slow task behind by its running groups. Invariants: no task is ahead
    of its due by a whole group, and a task that is behind is served first. Training waits for no absent task, and at
    most `PATIENCE_S` for a task that delivers nothing.
    """

    def __init__(self) -> None:
        self.due: Due | None = None
        """None: the oldest groups of all tasks come first."""
        self._missed_since_s: dict[str, float] = {}

    def delivered(self, service: str) -> None:
        """Notes that a task has a group on offer."""
        self._missed_since_s.pop(service, None)

    def next(self, waiting: Sequence[WaitingGroup], n: int, used: Mapping[str, int], now_s: float) -> BatchChoice:
        """The next `n` of `waiting`, which are in order; `used` counts the trained groups of each task."""
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
            since_s = [self._missed_since_s.setdefault(name, now_s) for name in missing]
            wait_s = max(since_s, default=now_s - PATIENCE_S) + PATIENCE_S - now_s
            if wait_s > CLOCK_S:
                return BatchChoice(wait_s=wait_s)
        return BatchChoice(tuple(chosen + ahead[: n - len(chosen)]))
