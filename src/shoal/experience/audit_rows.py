"""Checks the promises that a log's rows show without the rollouts: the fate of groups, and the order of steps."""

import sqlite3
from pathlib import Path

from shoal.experience import checkpoint
from shoal.experience.findings import AuditReport, Check
from shoal.experience.log import CONSUMED_OF, read_steps


def check_rows(connection: sqlite3.Connection, report: AuditReport, run_dir: Path) -> None:
    """Makes all checks that need no rollouts."""
    _account(connection, report)
    _check_uses(connection, report)
    _check_steps(connection, report)
    _check_admission(connection, report)
    _check_checkpoints(connection, report, run_dir)


def _account(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Counts each number by itself, so that the sum can be wrong."""

    def number(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    report.started = number("SELECT COUNT(*) FROM started")
    report.finished = number("SELECT COUNT(*) FROM groups WHERE group_id NOT IN (SELECT group_id FROM ended)")
    report.failed = number("SELECT COUNT(*) FROM ended WHERE outcome = 'failed'")
    report.dropped = number("SELECT COUNT(*) FROM ended WHERE outcome = 'dropped'")
    report.in_flight = number(
        "SELECT COUNT(*) FROM started WHERE group_id NOT IN (SELECT group_id FROM groups) "
        "AND group_id NOT IN (SELECT group_id FROM ended)"
    )
    report.consumed = number("SELECT COUNT(*) FROM consumed")
    report.steps = number("SELECT COUNT(*) FROM steps")
    for table in ("groups", "ended"):
        orphans = f"SELECT group_id FROM {table} WHERE group_id NOT IN (SELECT group_id FROM started)"
        for (group_id,) in connection.execute(orphans):
            report.found(Check.ACCOUNTING, group_id, f"is in {table} but was never started")
    for table, sequence in (("started", "started_seq"), ("groups", "finished_seq")):
        for (missing,) in connection.execute(_GAPS.format(table=table, sequence=sequence)):
            report.found(Check.ACCOUNTING, f"{sequence} {missing}", f"a row of {table} is missing")
    total = report.finished + report.failed + report.dropped + report.in_flight
    if report.started != total and Check.ACCOUNTING not in report.findings:
        report.found(Check.ACCOUNTING, "run", f"{report.started} groups started, {total} are accounted for")


# Rows are numbered without gaps; sqlite_sequence remembers the last number even when its row is gone.
_GAPS = """
WITH numbered AS (SELECT {sequence} AS n FROM {table} UNION SELECT seq + 1 FROM sqlite_sequence WHERE name = '{table}')
SELECT n - 1 FROM (SELECT n, LAG(n, 1, 0) OVER (ORDER BY n) AS before FROM numbered) WHERE n != before + 1
"""


def _check_uses(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Each use has a step and a group, each group at most one use."""
    for group_id, uses in connection.execute(
        "SELECT COALESCE(group_id, 'finished_seq ' || finished_seq), COUNT(*) "
        "FROM consumed LEFT JOIN groups USING (finished_seq) GROUP BY finished_seq HAVING COUNT(*) > 1"
    ):
        report.found(Check.USED_ONCE, group_id, f"was used {uses} times")
    for group_id, times in connection.execute("SELECT group_id, COUNT(*) FROM groups GROUP BY 1 HAVING COUNT(*) > 1"):
        report.found(Check.USED_ONCE, group_id, f"was committed {times} times")
    for group_id, outcome in connection.execute(
        "SELECT group_id, outcome FROM consumed JOIN groups USING (finished_seq) JOIN ended USING (group_id)"
    ):
        report.found(Check.USED_ONCE, group_id, f"was used and {outcome}")
    for seq, step in connection.execute(
        "SELECT finished_seq, step FROM consumed WHERE finished_seq NOT IN (SELECT finished_seq FROM groups) "
        "OR step NOT IN (SELECT step FROM steps)"
    ):
        report.found(Check.ACCOUNTING, f"finished_seq {seq}", f"used by step {step}: the group or the step is missing")


def _check_steps(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Checks that steps have no gaps, that each trains the Version before it, and that every K-th ends with a new
    Version.
    """
    meta, expected, version = report.meta, 0, 0
    for record in read_steps(connection):
        name = f"step {record.step}"
        if record.step != expected:
            report.found(Check.STEPS, name, f"comes where step {expected} was expected")
        if record.version != version:
            report.found(Check.STEPS, name, f"trained version {record.version}, and the step before left {version}")
        pushed, due = record.version_after - record.version, (record.step + 1) % meta.push_every == 0
        if pushed not in (0, 1) or (due and not pushed):
            report.found(Check.STEPS, name, f"went from version {record.version} to {record.version_after}")
        expected, version = record.step + 1, record.version_after
    own = f"SELECT step, SUM(peer_id IS NULL) AS own FROM {CONSUMED_OF} GROUP BY step HAVING own > ?"
    for step, count in connection.execute(own, (meta.groups_per_step,)):
        report.found(Check.STEPS, f"step {step}", f"trained {count} groups, expected at most {meta.groups_per_step}")
    early = (
        "SELECT DISTINCT version FROM published WHERE version > 0 AND version NOT IN (SELECT version_after FROM steps)"
    )
    for (published,) in connection.execute(early):
        report.found(Check.PUBLISHED, f"version {published}", "was published, and no recorded step leads to it")


def _check_admission(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Counts, after each step, the started groups without an end; an end at the same time counts as earlier."""
    meta = report.meta
    ended = dict(connection.execute("SELECT after_step, COUNT(*) FROM ended GROUP BY after_step"))
    versions = {-1: 0, **dict(connection.execute("SELECT step, version_after FROM steps"))}
    started = "SELECT after_step, COUNT(*) FROM started WHERE peer_id IS NULL GROUP BY after_step ORDER BY after_step"
    count = 0
    over = sorted(ended)
    for step, number in connection.execute(started).fetchall():
        count += number
        while over and over[0] <= step:
            count -= ended[over.pop(0)]
        if step not in versions:
            continue  # which is reported as such
        bound = (versions[step] + meta.max_staleness + 1) * meta.groups_per_step * meta.push_every
        if count > bound:
            report.found(
                Check.ADMISSION, f"step {step}", f"{count} groups were accepted or running, expected at most {bound}"
            )


def _check_checkpoints(connection: sqlite3.Connection, report: AuditReport, run_dir: Path) -> None:
    """Checks that no checkpoint holds more than the log: its last steps would be trained again."""
    (last,) = connection.execute("SELECT MAX(step) FROM steps").fetchone()
    for saved in checkpoint.checkpoints(run_dir):
        if last is None or saved.step > last:
            where = "has no step" if last is None else f"ends with step {last}"
            report.found(Check.CHECKPOINTS, saved.path.name, f"holds steps that the log has lost: it {where}")
