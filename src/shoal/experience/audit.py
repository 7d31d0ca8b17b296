"""Checks the promises of a run from the bytes of its log alone.

The audit trusts no number that the buffer computed. It reads versions, lengths and order from the stored rollouts, and
a group's history from the log's rows. It holds one group in memory, besides a few numbers for each waiting group.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from shoal import wire
from shoal.errors import WireError
from shoal.experience.audit_rows import check_rows
from shoal.experience.findings import KEPT_IDS, AuditReport, Check
from shoal.experience.log import BODY_BYTES, read_meta, read_steps, snapshot
from shoal.experience.raw import RawGroup, RawRollout, decode_rollout, read_groups
from shoal.types import RewardStatus, RolloutStatus, Task

__all__ = ["KEPT_IDS", "AuditReport", "Check", "audit"]

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
    for position, body in enumerate(group.bodies):
        try:
            rollouts.append(decode_rollout(body))
        except WireError as error:
            report.found(Check.READABLE, f"{group.id}/{position}", str(error))
    service = ""
    try:
        service = wire.decode(group.task, Task, BODY_BYTES).service
    except WireError as error:
        report.found(Check.READABLE, group.id, f"task: {error}")
    if not group.bodies and group.ended_reason is None:
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
