"""Counts of each task's groups, kept while a run goes and derived again from its log."""

import sqlite3
from collections import Counter
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
    """Number of started groups without an end."""

    @property
    def in_flight(self) -> int:
        """Number of finished groups that are not consumed yet."""
        return self.started - self.finished - self.failed.total() - self.dropped.total()

    @property
    def waiting(self) -> int:
        """Changes of the groups of one task between the end of the step before and the end of `step`."""
        return self.finished - self.consumed


@dataclass(frozen=True, slots=True)
class StepTaskCounts:
    """Number of groups that finished usable, also if they were dropped later."""

    step: int
    service: str
    started: int
    finished: int
    """Counts of the groups of each task service. Raises `RunDirError`."""
    failed: int
    dropped: int
    consumed: int


def task_counts(run_dir: Path) -> dict[str, TaskCounts]:
    """Counts per step and task service, in that order; the last step may be unfinished."""
    with snapshot(run_dir) as connection:
        return read_task_counts(connection)


def step_counts(run_dir: Path) -> list[StepTaskCounts]:
    """Counts of the groups of each task service, from an open log."""
    with snapshot(run_dir) as connection:
        return [StepTaskCounts(*row) for row in connection.execute(_STEP_COUNTS)]


def read_task_counts(connection: sqlite3.Connection) -> dict[str, TaskCounts]:
    """Per task service, what became of its groups."""
    counts: dict[str, TaskCounts] = {}
    for service, finished, outcome, reason, consumed, number in connection.execute(_TASK_COUNTS):
        task = counts.setdefault(service, TaskCounts())
        task.started += number
        task.consumed += consumed
        if outcome == "failed":
            task.failed[reason] += number
        elif outcome == "dropped":
            task.dropped[reason] += number
        elif finished:
            task.finished += number
    for service, number in connection.execute(_EXTERNAL_COUNTS):
        counts.setdefault(service, TaskCounts()).external = number
    return counts


_TASK_COUNTS = """
SELECT service, groups.group_id IS NOT NULL, outcome, reason, COUNT(step), COUNT(*)
FROM started LEFT JOIN groups USING (group_id) LEFT JOIN ended USING (group_id)
    LEFT JOIN consumed ON consumed.finished_seq = groups.finished_seq
WHERE peer_id IS NULL GROUP BY 1, 2, 3, 4
"""
_EXTERNAL_COUNTS = "SELECT service, COUNT(*) FROM started WHERE peer_id IS NOT NULL GROUP BY service"

_STEP_COUNTS = """
SELECT step, service, SUM(started), SUM(finished), SUM(failed), SUM(dropped), SUM(consumed) FROM (
    SELECT after_step + 1 AS step, service, 1 AS started, 0 AS finished, 0 AS failed, 0 AS dropped, 0 AS consumed
    FROM started WHERE peer_id IS NULL
    UNION ALL SELECT groups.after_step + 1, service, 0, 1, 0, 0, 0
    FROM groups JOIN started USING (group_id) LEFT JOIN ended USING (group_id)
    WHERE outcome IS NOT 'failed' AND peer_id IS NULL
    UNION ALL SELECT ended.after_step + 1, service, 0, 0, outcome = 'failed', outcome = 'dropped', 0
    FROM ended JOIN started USING (group_id)
    UNION ALL SELECT step, service, 0, 0, 0, 0, 1
    FROM consumed JOIN groups USING (finished_seq) JOIN started USING (group_id) WHERE peer_id IS NULL
) GROUP BY step, service ORDER BY step, service
"""
