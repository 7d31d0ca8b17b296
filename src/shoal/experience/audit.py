"""The promises of a run, checked from the bytes of its log alone.

Nothing that the buffer computed is believed: versions, lengths and order are taken from the stored rollouts, and what
happened to a group from the rows that say so. One group is in memory at a time, besides a few numbers for each that
waits.
"""

import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from shoal import wire
from shoal.errors import WireError
from shoal.experience.log import BODY_BYTES, RunMeta, read_meta, snapshot
from shoal.experience.raw import RawGroup, RawRollout, RawTask, read_groups, rollout_id
from shoal.types import EXTERNAL

KEPT_IDS = 100
"""Offending ids remembered per check; all are counted."""


class Check(StrEnum):
    """What is promised of every run."""

    USED_ONCE = "each group is used at most once"
    OLDEST_FIRST = "of each task the oldest groups are consumed first"
    STALENESS = "no token older than eta versions is trained"
    STREAMS = "tokens, logprobs and versions have one length"
    VERSIONS = "versions do not decrease within a row"
    LOGPROBS = "logprobs are finite and <= 0"
    ACCOUNTING = "started = finished + failed + dropped + in flight"
    READABLE = "every record can be read"


@dataclass(slots=True)
class Finding:
    """What broke one promise."""

    count: int = 0
    offenders: list[tuple[str, str]] = field(default_factory=list)
    """Id of the group or rollout, and what is wrong with it; the first `KEPT_IDS`."""

    @property
    def ids(self) -> list[str]:
        """Of the offending groups or rollouts."""
        return [offender for offender, _ in self.offenders]


@dataclass(slots=True)
class AuditReport:
    """What an audit saw and found."""

    meta: RunMeta
    started: int = 0
    finished: int = 0
    """Usable and not dropped since."""
    failed: int = 0
    dropped: int = 0
    in_flight: int = 0
    consumed: int = 0
    steps: int = 0
    rollouts: int = 0
    tokens: int = 0
    """Drawn ones."""
    staleness_max: int = 0
    """Of the trained tokens, at consumption."""
    findings: dict[Check, Finding] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """0 when every promise was kept, else 1."""
        return 0 if self.ok else 1

    def sentences(self) -> list[str]:
        """The report in words, a line each."""
        lines = [
            f"{self.started} groups started = {self.finished} finished + {self.failed} failed + {self.dropped} dropped "
            f"+ {self.in_flight} in flight",
            f"{self.consumed} groups consumed by {self.steps} steps; {self.rollouts} rollouts, {self.tokens} tokens; "
            f"staleness at most {self.staleness_max} (eta {self.meta.eta}, late groups: {self.meta.late})",
        ]
        for check in Check:
            finding = self.findings.get(check)
            lines.append(f"{'ok    ' if finding is None else 'BROKEN'} {check}")
            if finding is not None:
                lines += [f"       {offender}: {detail}" for offender, detail in finding.offenders]
                if finding.count > len(finding.offenders):
                    lines.append(f"       and {finding.count - len(finding.offenders)} more")
        return lines

    def found(self, check: Check, offender: str, detail: str) -> None:
        """Records one offence."""
        finding = self.findings.setdefault(check, Finding())
        finding.count += 1
        if len(finding.offenders) < KEPT_IDS:
            finding.offenders.append((offender, detail))


def audit(run_dir: Path) -> AuditReport:
    """Checks a run that has ended, was killed or goes on. Raises `RunDirError` when there is no log to read."""
    with snapshot(run_dir) as connection:
        report = AuditReport(read_meta(connection))
        _account(connection, report)
        _check_uses(connection, report)
        _check_order(connection, report)
        return report


def _account(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Each number is counted by itself, so that the sum can be wrong."""

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


@dataclass(frozen=True, slots=True, order=True)
class _Seen:
    """What the order of consumption depends on, of one group."""

    oldest_version: int
    finished_seq: int
    id: str
    ended_after: int | None
    service: str

    def waits_at(self, step: int) -> bool:
        return self.ended_after is None or self.ended_after >= step


def _check_order(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Replays what waited when: of a task's groups up to a horizon, those with the oldest token come first."""
    groups = (_check_group(group, report) for group in read_groups(connection))
    ahead = next(groups, None)
    waiting: dict[int, _Seen] = {}
    for step, horizon, chosen in _choices(connection):
        while ahead is not None and ahead.finished_seq <= horizon:
            if not ahead.id.startswith(EXTERNAL):  # it was never on offer
                waiting[ahead.finished_seq] = ahead
            ahead = next(groups, None)
        waiting = {seq: seen for seq, seen in waiting.items() if seq in chosen or seen.waits_at(step)}
        for seq, group_id in chosen.items():
            if seq > horizon:
                report.found(Check.OLDEST_FIRST, group_id, f"chosen by step {step} before it was there")
        taken = sorted(waiting.pop(seq) for seq in chosen.keys() & waiting.keys())
        first: dict[str, _Seen] = {}  # of those that went on waiting, by task
        for seen in sorted(waiting.values()):
            first.setdefault(seen.service, seen)
        for seen in taken:
            if seen.service in first and seen > first[seen.service]:
                detail = f"of version {seen.oldest_version}, consumed by step {step} before "
                before = first[seen.service]
                report.found(Check.OLDEST_FIRST, seen.id, f"{detail}{before.id} of version {before.oldest_version}")
    for _ in groups:
        pass  # what nobody chose is checked too


def _choices(connection: sqlite3.Connection) -> Iterator[tuple[int, int, dict[int, str]]]:
    """(step, horizon, ids of the groups by finished_seq) of each time groups were taken."""
    rows = connection.execute(
        "SELECT step, horizon, finished_seq, COALESCE(group_id, 'finished_seq ' || finished_seq) "
        "FROM consumed LEFT JOIN groups USING (finished_seq) "
        "WHERE group_id IS NULL OR group_id NOT LIKE ? ORDER BY step, horizon",
        (f"{EXTERNAL}%",),
    )
    for (step, horizon), chosen in groupby(rows, key=itemgetter(0, 1)):
        yield step, horizon, {seq: group_id for _, _, seq, group_id in chosen}


def _check_group(group: RawGroup, report: AuditReport) -> _Seen:
    """Checks what a group's bytes say; gives what is needed to check when it was consumed."""
    drawn: list[int] = []
    for position, body in enumerate(group.bodies):
        name = f"{group.id}/{position}"
        try:
            rollout = wire.decode(body, RawRollout, BODY_BYTES)
        except WireError as error:
            report.found(Check.READABLE, rollout_id(body, name), str(error))
            continue
        _check_rollout(rollout, report)
        drawn += rollout.drawn_versions
    service = ""
    try:
        service = wire.decode(group.task, RawTask, BODY_BYTES).service
    except WireError as error:
        report.found(Check.READABLE, group.id, f"task: {error}")
    if not group.bodies and group.ended_reason is None:
        report.found(Check.READABLE, group.id, "has no rollouts")
    oldest = min(drawn, default=group.admitted_version)
    if group.version is not None:
        _check_staleness(group, oldest, max(drawn, default=group.admitted_version), report)
    return _Seen(oldest, group.finished_seq, group.id, group.ended_after, service)


def _check_staleness(group: RawGroup, oldest: int, newest: int, report: AuditReport) -> None:
    """Of one consumed group. Under "train" late groups are trained by choice, and only measured."""
    assert group.version is not None
    trained_from = oldest
    if report.meta.late == "mask_tokens" and group.trained_from is not None:
        trained_from = max(oldest, group.trained_from)
    staleness = group.version - trained_from
    report.staleness_max = max(report.staleness_max, staleness)
    if staleness > report.meta.eta and report.meta.late != "train":
        detail = (
            f"consumed under version {group.version} with tokens of {trained_from}: {staleness} > {report.meta.eta}"
        )
        report.found(Check.STALENESS, group.id, detail)
    if newest > group.version:
        report.found(Check.STALENESS, group.id, f"consumed under version {group.version} with tokens of {newest}")


def _check_rollout(rollout: RawRollout, report: AuditReport) -> None:
    """Checks the streams of one rollout."""
    report.rollouts += 1
    for turn in rollout.turns:
        drawn = turn.completion
        report.tokens += len(drawn.token_ids)
        if not len(drawn.token_ids) == len(drawn.logprobs) == len(drawn.versions):
            lengths = f"{len(drawn.token_ids)} tokens, {len(drawn.logprobs)} logprobs, {len(drawn.versions)} versions"
            report.found(Check.STREAMS, rollout.id, lengths)
        if not all(map(math.isfinite, drawn.logprobs)) or max(drawn.logprobs, default=0.0) > 0:
            bad = next(lp for lp in drawn.logprobs if not math.isfinite(lp) or lp > 0)
            report.found(Check.LOGPROBS, rollout.id, f"has a logprob of {bad}")
    for versions in rollout.row_versions:
        if versions != sorted(versions):
            later, earlier = next((b, a) for a, b in pairwise(versions) if b < a)
            report.found(Check.VERSIONS, rollout.id, f"drew a token under version {later} after one under {earlier}")
