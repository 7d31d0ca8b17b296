"""Checks the promises that a log's rows show without the rollouts: the fate of groups, and the order of steps."""

import sqlite3
from pathlib import Path

from shoal.experience import checkpoint
from shoal.experience.findings import AuditReport, Check
from shoal.experience.log import CONSUMED_OF, read_steps

# Each count is taken by itself, so that the sum can be wrong.
_COUNTS = {
    "started": "FROM started",
    "finished": "FROM groups WHERE group_id NOT IN (SELECT group_id FROM ended)",
    "failed": "FROM ended WHERE outcome = 'failed'",
    "dropped": "FROM ended WHERE outcome = 'dropped'",
    "in_flight": "FROM started WHERE group_id NOT IN (SELECT group_id FROM groups UNION SELECT group_id FROM ended)",
    "consumed": "FROM consumed",
    "steps": "FROM steps",
}
_NOT_STARTED = "WHERE group_id NOT IN (SELECT group_id FROM started)"
# Rows are numbered without gaps; sqlite_sequence remembers the last number even when its row is gone.
_GAPS = """
WITH numbered AS (SELECT {sequence} AS n FROM {table} UNION SELECT seq + 1 FROM sqlite_sequence WHERE name = '{table}')
SELECT '{sequence} ' || (n - 1), 'a row of {table} is missing'
FROM (SELECT n, LAG(n, 1, 0) OVER (ORDER BY n) AS before FROM numbered) WHERE n != before + 1
"""
_OFFENCES = (
    (Check.ACCOUNTING, f"SELECT group_id, 'is in groups but was never started' FROM groups {_NOT_STARTED}"),
    (Check.ACCOUNTING, f"SELECT group_id, 'is in ended but was never started' FROM ended {_NOT_STARTED}"),
    (Check.ACCOUNTING, _GAPS.format(table="started", sequence="started_seq")),
    (Check.ACCOUNTING, _GAPS.format(table="groups", sequence="finished_seq")),
    (
        Check.ACCOUNTING,
        "SELECT 'finished_seq ' || finished_seq, 'used by step ' || step || ': the group or the step is missing' "
        "FROM consumed WHERE finished_seq NOT IN (SELECT finished_seq FROM groups) "
        "OR step NOT IN (SELECT step FROM steps)",
    ),
    (
        Check.USED_ONCE,
        "SELECT COALESCE(group_id, 'finished_seq ' || finished_seq), 'was used ' || COUNT(*) || ' times' "
        "FROM consumed LEFT JOIN groups USING (finished_seq) GROUP BY finished_seq HAVING COUNT(*) > 1",
    ),
    (
        Check.USED_ONCE,
        "SELECT group_id, 'was committed ' || COUNT(*) || ' times' FROM groups GROUP BY 1 HAVING COUNT(*) > 1",
    ),
    (
        Check.USED_ONCE,
        "SELECT group_id, 'was used and ' || outcome "
        "FROM consumed JOIN groups USING (finished_seq) JOIN ended USING (group_id)",
    ),
    (
        Check.STEPS,
        "SELECT 'step ' || step, 'trained ' || SUM(peer_id IS NULL) || ' groups, expected at most ' || :groups_per_step"
        f" FROM {CONSUMED_OF} GROUP BY step HAVING SUM(peer_id IS NULL) > :groups_per_step",
    ),
    (
        Check.PUBLISHED,
        "SELECT DISTINCT 'version ' || version, 'was published, and no recorded step leads to it' FROM published "
        "WHERE version > 0 AND version NOT IN (SELECT version_after FROM steps)",
    ),
)


def check_rows(connection: sqlite3.Connection, report: AuditReport, run_dir: Path) -> None:
    """Makes all checks that need no rollouts."""
    for name, rows in _COUNTS.items():
        setattr(report, name, connection.execute(f"SELECT COUNT(*) {rows}").fetchone()[0])
    for check, offences in _OFFENCES:
        for offender, detail in connection.execute(offences, {"groups_per_step": report.meta.groups_per_step}):
            report.found(check, offender, detail)
    total = report.finished + report.failed + report.dropped + report.in_flight
    if report.started != total and Check.ACCOUNTING not in report.findings:
        report.found(Check.ACCOUNTING, "run", f"{report.started} groups started, {total} are accounted for")
    _check_steps(connection, report)
    _check_admission(connection, report)
    _check_checkpoints(connection, report, run_dir)


def _check_steps(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Checks that steps have no gaps, that each trains the Version before it, and that every K-th ends with a new
    Version.
    """
    expected, version = 0, 0
    for record in read_steps(connection):
        name = f"step {record.step}"
        if record.step != expected:
            report.found(Check.STEPS, name, f"comes where step {expected} was expected")
        if record.version != version:
            report.found(Check.STEPS, name, f"trained version {record.version}, and the step before left {version}")
        pushed, due = record.version_after - record.version, (record.step + 1) % report.meta.push_every == 0
        if pushed not in (0, 1) or (due and not pushed):
            report.found(Check.STEPS, name, f"went from version {record.version} to {record.version_after}")
        expected, version = record.step + 1, record.version_after


def _check_admission(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Counts, after each step, the started groups without an end; an end at the same time counts as earlier."""
    meta = report.meta
    started = "SELECT after_step, COUNT(*) AS change, 1 AS starts FROM started WHERE peer_id IS NULL GROUP BY 1"
    ended = "SELECT after_step, -COUNT(*), 0 FROM ended GROUP BY 1"
    after = f"SELECT *, SUM(change) OVER (ORDER BY after_step, starts) FROM ({started} UNION ALL {ended})"
    versions = {-1: 0, **dict(connection.execute("SELECT step, version_after FROM steps"))}
    for step, _, starts, count in connection.execute(after):
        bound = meta.staleness.versions_admitted(versions.get(step, 0)) * meta.groups_per_step * meta.push_every
        if starts and step in versions and count > bound:  # a missing step is reported as such
            detail = f"{count} groups were accepted or running, expected at most {bound}"
            report.found(Check.ADMISSION, f"step {step}", detail)


def _check_checkpoints(connection: sqlite3.Connection, report: AuditReport, run_dir: Path) -> None:
    """Checks that no checkpoint holds more than the log: its last steps would be trained again."""
    (last,) = connection.execute("SELECT MAX(step) FROM steps").fetchone()
    for saved in checkpoint.checkpoints(run_dir):
        if last is None or saved.step > last:
            where = "has no step" if last is None else f"ends with step {last}"
            report.found(Check.CHECKPOINTS, saved.path.name, f"holds steps that the log has lost: it {where}")
