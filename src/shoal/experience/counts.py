"""Counts of each task's groups, kept while a run goes and derived again from its log."""

import sqlite3
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from shoal.experience.log import snapshot


@dataclass(slots=True)
class TaskCounts:
    """Own groups of one task service. Invariant: `started == finished + failed + dropped + in_flight`."""

    started: int = 0
    finished: int = 0
    """Number of usable groups that were not dropped since: consumed or waiting."""
    consumed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Number of failed groups by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups by reason."""
    external: int = 0
    """Number of groups of peers that were consumed; they are in no other number."""

    @property
    def in_flight(self) -> int:
        """Number of started groups without an end."""
        return self.started - self.finished - self.failed.total() - self.dropped.total()

    @property
    def waiting(self) -> int:
        """Number of finished groups that are not consumed yet."""
        return self.finished - self.consumed


def task_counts(run_dir: Path) -> dict[str, TaskCounts]:
    """Counts of the groups of each task service. Raises `RunDirError`."""
    with snapshot(run_dir) as connection:
        return read_task_counts(connection)


def read_task_counts(connection: sqlite3.Connection) -> defaultdict[str, TaskCounts]:
    """Counts of the groups of each task service, from an open log."""
    counts: defaultdict[str, TaskCounts] = defaultdict(TaskCounts)
    for service, finished, outcome, reason, consumed, number in connection.execute(_TASK_COUNTS):
        task = counts[service]
        task.started += number
        task.consumed += consumed
        if outcome == "failed":
            task.failed[reason] += number
        elif outcome == "dropped":
            task.dropped[reason] += number
        elif finished:
            task.finished += number
    for service, number in connection.execute(_EXTERNAL_COUNTS):
        counts[service].external = number
    return counts


_TASK_COUNTS = """
SELECT service, groups.group_id IS NOT NULL, outcome, reason, COUNT(step), COUNT(*)
FROM started LEFT JOIN groups USING (group_id) LEFT JOIN ended USING (group_id)
    LEFT JOIN consumed ON consumed.finished_seq = groups.finished_seq
WHERE peer_id IS NULL GROUP BY 1, 2, 3, 4
"""
_EXTERNAL_COUNTS = "SELECT service, COUNT(*) FROM started WHERE peer_id IS NOT NULL GROUP BY service"
