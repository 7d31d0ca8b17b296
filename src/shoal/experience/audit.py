"""Checks the promises of a run from the bytes of its log alone.

The audit trusts no number that the buffer computed. It reads versions, lengths and order from the stored rollouts, and
a group's history from the log's rows. It holds one group in memory, besides a few numbers for each waiting group.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from shoal import wire
from shoal.errors import WireError
from shoal.experience import checkpoint
from shoal.experience.log import BODY_BYTES, CONSUMED_OF, read_meta, read_steps, snapshot
from shoal.experience.raw import RawGroup, RawRollout, decode_rollout, read_groups
from shoal.experience.schema import RunMeta
from shoal.types import RewardStatus, RolloutStatus, Task

KEPT_IDS = 100
"""Number of offending ids remembered per check; all are counted."""


class Check(StrEnum):
    """A promise of every run."""

    USED_ONCE = "each group is used at most once"
    OLDEST_FIRST = "of each task the oldest groups are consumed first"
    STALENESS = "no token older than max_staleness versions is trained"
    STREAMS = "tokens, logprobs and versions have one length"
    VERSIONS = "versions do not decrease within a row"
    LOGPROBS = "logprobs are finite and <= 0"
    ACCOUNTING = "started = finished + failed + dropped + in flight"
    READABLE = "every record can be read"
    ADMISSION = "no more groups are accepted and running than the bound allows"
    USABLE = "no group is trained of which half or more failed"
    FAILURES = "failed rollouts have a reason, and unscored rollouts have no reward"
    STEPS = "steps follow one another and push when it is due"
    PUBLISHED = "no version is published before its step is recorded"
    CHECKPOINTS = "the log has every step that a checkpoint holds"


@dataclass(slots=True)
class Finding:
    """The groups or rollouts that broke one promise."""

    count: int = 0
    offenders: list[tuple[str, str]] = field(default_factory=list)
    """Id of each offending group or rollout with its fault; the first `KEPT_IDS`."""

    @property
    def ids(self) -> list[str]:
        """Ids of the offending groups or rollouts."""
        return [offender for offender, _ in self.offenders]


@dataclass(slots=True)
class AuditReport:
    """Figures and findings of an audit."""

    meta: RunMeta
    started: int = 0
    finished: int = 0
    """Number of usable groups that were not dropped since."""
    failed: int = 0
    dropped: int = 0
    in_flight: int = 0
    consumed: int = 0
    steps: int = 0
    rollouts: int = 0
    tokens: int = 0
    """Number of sampled tokens."""
    staleness_max: int = 0
    """Highest staleness of the trained tokens at consumption, in Versions."""
    staleness_steps: int = 0
    """Highest staleness in steps: with a new Version every K steps, one Version is up to K steps."""
    findings: dict[Check, Finding] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every promise was kept."""
        return not self.findings

    def sentences(self) -> list[str]:
        """The report in words, a line each."""
        lines = [
            f"{self.started} groups started = {self.finished} finished + {self.failed} failed + {self.dropped} dropped "
            f"+ {self.in_flight} in flight",
            f"{self.consumed} groups consumed by {self.steps} steps; {self.rollouts} rollouts, {self.tokens} tokens; "
            f"staleness at most {self.staleness_max} versions, {self.staleness_steps} steps "
            f"(max_staleness {self.meta.max_staleness}, late groups: {self.meta.late})",
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


FAILED = RolloutStatus.FAILED


def audit(run_dir: Path) -> AuditReport:
    """Checks a run that has ended, was killed or is running. Raises `RunDirError` without a readable log."""
    with snapshot(run_dir) as connection:
        report = AuditReport(read_meta(connection))
        check_rows(connection, report, run_dir)
        _check_order(connection, report)
        return report


@dataclass(frozen=True, slots=True, order=True)
class _Seen:
    """Values of one group on which the order of consumption depends."""

    oldest_version: int
    finished_seq: int
    id: str
    ended_after: int | None
    service: str
    is_own: bool

    def waits_at(self, step: int) -> bool:
        return self.ended_after is None or self.ended_after >= step


def _check_order(connection: sqlite3.Connection, report: AuditReport) -> None:
    """Replays the waiting groups over time: of a task's groups up to a horizon, the oldest token comes first."""
    pushed = {record.version_after: record.step for record in reversed(read_steps(connection))} | {0: -1}
    groups = (_check_group(group, report, pushed) for group in read_groups(connection))
    ahead = next(groups, None)
    waiting: dict[int, _Seen] = {}
    for step, horizon, chosen in _choices(connection):
        while ahead is not None and ahead.finished_seq <= horizon:
            if ahead.is_own:  # a peer's group was never on offer
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
        pass  # also checks the groups that were never chosen


def _choices(connection: sqlite3.Connection) -> Iterator[tuple[int, int, dict[int, str]]]:
    """(step, horizon, ids of the groups by finished_seq) of each choice of groups."""
    rows = connection.execute(
        "SELECT step, horizon, finished_seq, COALESCE(group_id, 'finished_seq ' || finished_seq) "
        "FROM consumed LEFT JOIN groups USING (finished_seq) LEFT JOIN started USING (group_id) "
        "WHERE peer_id IS NULL ORDER BY step, horizon"
    )
    for (step, horizon), chosen in groupby(rows, key=itemgetter(0, 1)):
        yield step, horizon, {seq: group_id for _, _, seq, group_id in chosen}


def _check_group(group: RawGroup, report: AuditReport, pushed: Mapping[int, int]) -> _Seen:
    """Checks a group's bytes; returns the values that the check of the order needs."""
    rollouts: list[RawRollout] = []
    if group.lost is not None:
        report.found(Check.READABLE, f"{group.id}/{group.lost}", "is missing")
    for position, body in zip(group.positions, group.bodies, strict=True):
        try:
            rollouts.append(decode_rollout(body))
        except WireError as error:
            report.found(Check.READABLE, f"{group.id}/{position}", str(error))
    service = ""
    try:
        service = wire.decode(group.task, Task, BODY_BYTES).service
    except WireError as error:
        report.found(Check.READABLE, group.id, f"task: {error}")
    if not group.bodies and (group.size or group.ended_reason is None):
        report.found(Check.READABLE, group.id, "has no rollouts")
    for rollout in rollouts:
        _check_rollout(rollout, report)
    if group.version is not None:
        _check_staleness(group, rollouts, report, pushed)
        failed = sum(rollout.status == FAILED for rollout in rollouts)
        if 2 * failed >= len(rollouts) and group.peer_id is None:
            report.found(Check.USABLE, group.id, f"was trained though {failed} of {len(rollouts)} rollouts failed")
    drawn = (version for rollout in rollouts for version in rollout.sampled_versions)
    oldest = min(drawn, default=group.admitted_version)
    return _Seen(oldest, group.finished_seq, group.id, group.ended_after, service, group.peer_id is None)


def _check_staleness(
    group: RawGroup, rollouts: Sequence[RawRollout], report: AuditReport, pushed: Mapping[int, int]
) -> None:
    """Checks the staleness of a consumed group. Under "train" late groups are trained by choice, and only measured."""
    assert group.version is not None
    drawn = [version for rollout in rollouts for version in rollout.sampled_versions]
    oldest, newest = min(drawn, default=group.admitted_version), max(drawn, default=group.admitted_version)
    bound, late = report.meta.staleness.oldest(group.version), report.meta.late
    if newest > group.version:
        report.found(Check.STALENESS, group.id, f"consumed under version {group.version} with tokens of {newest}")
    if late == "mask_tokens" and oldest < bound:
        oldest = _oldest_unmasked(group, rollouts, report, bound)
    if late == "drop" and oldest < bound:
        detail = f"consumed under version {group.version} with tokens of {oldest}, expected {bound} or newer"
        report.found(Check.STALENESS, group.id, detail)
    report.staleness_max = max(report.staleness_max, group.version - oldest)
    if group.step is not None and oldest in pushed:
        report.staleness_steps = max(report.staleness_steps, group.step - pushed[oldest] - 1)


def _oldest_unmasked(group: RawGroup, rollouts: Sequence[RawRollout], report: AuditReport, bound: int) -> int:
    """The oldest trained Version of a group with late tokens, each of which must have been masked."""
    assert group.version is not None
    used = [version for rollout in rollouts if rollout.status != FAILED for version in rollout.sampled_versions]
    late = sum(version < bound for version in used)
    if (group.masked_tokens or 0) < late:
        detail = f"{late} tokens are older than version {bound}, of which {group.masked_tokens} were masked"
        report.found(Check.STALENESS, group.id, detail)
        return min(used)
    trained_from = group.version if group.trained_from is None else group.trained_from
    if trained_from < bound or (group.trained_from is not None and trained_from not in used):
        detail = f"tokens of version {trained_from} were trained, expected ones of the group, of {bound} or newer"
        report.found(Check.STALENESS, group.id, detail)
    return trained_from


def _check_rollout(rollout: RawRollout, report: AuditReport) -> None:
    """Checks the streams of one rollout, and that a failed rollout has no reward."""
    report.rollouts += 1
    if rollout.status == FAILED and not rollout.reason:
        report.found(Check.FAILURES, rollout.id, "failed without a reason")
    if rollout.status != FAILED and rollout.reward.status != RewardStatus.SCORED:
        report.found(Check.FAILURES, rollout.id, f"has a reward though its scoring {rollout.reward.status}")
    for turn in rollout.turns:
        drawn = turn.completion
        report.tokens += len(drawn.token_ids)
        if not len(drawn.token_ids) == len(drawn.logprobs) == len(drawn.versions):
            lengths = f"{len(drawn.token_ids)} tokens, {len(drawn.logprobs)} logprobs, {len(drawn.versions)} versions"
            report.found(Check.STREAMS, rollout.id, lengths)
        if not all(map(math.isfinite, drawn.logprobs)) or max(drawn.logprobs, default=0.0) > 0:
            bad = next(lp for lp in drawn.logprobs if not math.isfinite(lp) or lp > 0)
            report.found(Check.LOGPROBS, rollout.id, f"has a logprob of {bad}")
    try:
        rows = rollout.row_versions
    except ValueError as error:
        report.found(Check.STREAMS, rollout.id, str(error))
        return
    for versions in rows:
        if versions != sorted(versions):
            later, earlier = next((b, a) for a, b in pairwise(versions) if b < a)
            report.found(Check.VERSIONS, rollout.id, f"drew a token under version {later} after one under {earlier}")


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
