"""Each promise of a run, broken on purpose in its log, is reported with the id of what broke it."""

import asyncio
import math
import os
import sqlite3

import msgspec
import pyarrow.parquet as pq
import pytest

from buffer_values import group, open_buffer, run_group, train
from shoal.errors import LogBehind, RunDirError
from shoal.experience import checkpoint
from shoal.experience.audit import KEPT_IDS, Check, audit
from shoal.experience.log import FILE, snapshot
from shoal.experience.schema import RunMeta

META = RunMeta(max_staleness=2, late="drop", groups_per_step=2, push_every=1)


@pytest.fixture
def run_dir(tmp_path):
    """A run of 3 steps: g0..g5 consumed, g6 waiting, g7 failed, g8 dropped, g9 in flight."""

    async def main():
        buffer = open_buffer(tmp_path, META)
        for step in range(3):
            for i in (2 * step, 2 * step + 1):
                await run_group(buffer, f"g{i}")
            await train(buffer, step, step)
        await run_group(buffer, "g8")
        await buffer.take(1, 3)
        await buffer.drop(["g8"], "uninformative")
        await run_group(buffer, "g6")
        await buffer.admit("g7", "chain_sum")
        await buffer.fail("g7", "service down")
        await buffer.admit("g9", "chain_sum")
        await buffer.close()

    asyncio.run(main())
    return tmp_path


async def with_archive(run_dir):
    """Moves the first two steps out of the log."""
    buffer = open_buffer(run_dir, META, resume=True)
    await buffer.archive(1)
    await buffer.close()


def without_sizes(file):
    """Writes a file of the archive anew, without the sizes of groups."""
    with pq.ParquetFile(file) as opened:
        tables = [opened.read_row_group(i).drop_columns("size") for i in range(opened.metadata.num_row_groups)]
    with pq.ParquetWriter(file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def plant(run_dir, *statements):
    connection = sqlite3.connect(run_dir / FILE)
    for statement in statements:
        connection.execute(*statement) if isinstance(statement, tuple) else connection.execute(statement)
    connection.commit()
    connection.close()


def plant_rollout(run_dir, rollout_id, turn=None, **streams):
    """Overwrites the first turn, and its streams, of the rollouts whose ids begin so, with values that types refuse."""
    connection = sqlite3.connect(run_dir / FILE)
    for rowid, body in connection.execute("SELECT rowid, body FROM rollouts").fetchall():
        raw = msgspec.msgpack.decode(body[1:])
        if raw["id"].startswith(rollout_id):
            raw["turns"][0].update(turn or {})
            raw["turns"][0]["completion"].update(streams)
            changed = body[:1] + msgspec.msgpack.encode(raw)
            connection.execute("UPDATE rollouts SET body = ? WHERE rowid = ?", (changed, rowid))
    connection.commit()
    connection.close()


def offenders(run_dir, check):
    """Of one check; no other check may complain."""
    report = audit(run_dir)
    assert set(report.findings) == {check}, report.sentences()
    assert not report.ok
    ids = report.findings[check].ids
    text = "\n".join(report.sentences())
    assert all(offender in text for offender in ids)
    assert f"BROKEN {check}" in text
    assert "       and " not in text, "all offenders are named"
    return ids


def test_a_clean_run_is_clean_and_its_numbers_add_up(run_dir):
    report = audit(run_dir)
    assert report.ok, report.sentences()
    assert (report.started, report.finished, report.failed, report.dropped, report.in_flight) == (10, 7, 1, 1, 1)
    assert (report.consumed, report.steps, report.rollouts, report.staleness_max) == (6, 3, 16, 0)
    assert "BROKEN" not in "".join(report.sentences())


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_run_that_goes_on_can_be_audited(tmp_path, max_staleness):
    async def main():
        buffer = open_buffer(
            tmp_path, RunMeta(max_staleness=max_staleness, late="drop", groups_per_step=2, push_every=1)
        )
        started = 0
        for step in range(8):
            while buffer.gate.capacity > 0:
                await run_group(buffer, f"g{started}")
                started += 1
            await train(buffer, step, step)
            report = await asyncio.to_thread(audit, tmp_path)
            assert report.ok, report.sentences()
            assert report.consumed == 2 * (step + 1)
        await buffer.close()
        return report.staleness_max

    assert asyncio.run(main()) == max_staleness


def test_a_group_that_was_used_and_dropped_is_reported(run_dir):
    plant(run_dir, "INSERT INTO ended VALUES ('g5', 'dropped', 'stale', 2)")
    assert "g5" in audit(run_dir).findings[Check.USED_ONCE].ids


def test_a_group_that_was_committed_twice_is_reported(run_dir):
    plant(
        run_dir,
        "CREATE TABLE others AS SELECT * FROM groups",
        "INSERT INTO others SELECT 9, group_id, task, admitted_version, after_step, 2 FROM groups WHERE finished_seq=6",
        "DROP TABLE groups",
        "ALTER TABLE others RENAME TO groups",
    )
    assert audit(run_dir).findings[Check.USED_ONCE].offenders == [("g5", "was committed 2 times")]


def test_a_group_consumed_before_an_older_one_is_reported(run_dir):
    for rollout_id in ("g6/0", "g6/1"):
        plant_rollout(run_dir, rollout_id, versions=[2, 2])
    plant(run_dir, "UPDATE consumed SET finished_seq = 8 WHERE finished_seq = 6", "UPDATE consumed SET horizon = 8")
    assert offenders(run_dir, Check.OLDEST_FIRST) == ["g6"]


def test_a_group_consumed_before_it_was_there_is_reported(run_dir):
    plant(run_dir, "UPDATE consumed SET horizon = 5 WHERE step = 2")
    assert offenders(run_dir, Check.OLDEST_FIRST) == ["g5"]


def test_a_group_with_a_token_older_than_eta_is_reported(run_dir):
    plant_rollout(run_dir, "g5/1", versions=[-1, 2])
    plant(run_dir, "UPDATE consumed SET position = 9 WHERE finished_seq = 5")
    assert offenders(run_dir, Check.STALENESS) == ["g5"]


def test_a_group_with_tokens_newer_than_the_weights_it_trained_is_reported(run_dir):
    plant_rollout(run_dir, "g4/0", versions=[2, 3])
    assert offenders(run_dir, Check.STALENESS) == ["g4"]


@pytest.mark.parametrize(
    "streams", [{"token_ids": [1]}, {"logprobs": [-0.1] * 3}, {"versions": [0]}, {"token_ids": [], "versions": []}]
)
def test_streams_of_unequal_length_are_reported(run_dir, streams):
    plant_rollout(run_dir, "g0/1", **streams)
    assert offenders(run_dir, Check.STREAMS) == ["g0/1"]


def test_a_trained_group_without_a_token_is_as_old_as_its_admission(run_dir):
    connection = sqlite3.connect(run_dir / FILE)
    for rowid, body in connection.execute("SELECT rowid, body FROM rollouts WHERE finished_seq = 5").fetchall():
        raw = {**msgspec.msgpack.decode(body[1:]), "turns": []}
        changed = body[:1] + msgspec.msgpack.encode(raw)
        connection.execute("UPDATE rollouts SET body = ? WHERE rowid = ?", (changed, rowid))
    connection.commit()
    connection.close()
    report = audit(run_dir)
    assert report.ok, report.sentences()
    assert (report.tokens, report.staleness_max) == (28, 0)


def test_a_turn_that_goes_on_from_itself_is_reported(run_dir):
    plant_rollout(run_dir, "g3/0", turn={"parent": 0})
    assert offenders(run_dir, Check.STREAMS) == ["g3/0"]


def test_a_version_that_decreases_within_a_rollout_is_reported(run_dir):
    plant_rollout(run_dir, "g3/0", versions=[1, 0])
    assert offenders(run_dir, Check.VERSIONS) == ["g3/0"]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, 0.25])
@pytest.mark.parametrize("place", [0, 1])
def test_a_logprob_that_is_not_finite_or_above_0_is_reported(run_dir, bad, place):
    logprobs = [-0.5, -0.5]
    logprobs[place] = bad
    plant_rollout(run_dir, "g6/1", logprobs=logprobs)
    assert offenders(run_dir, Check.LOGPROBS) == ["g6/1"]
    assert audit(run_dir).findings[Check.LOGPROBS].offenders == [("g6/1", f"has a logprob of {bad}")]


def test_a_lost_start_is_reported(run_dir):
    plant(run_dir, "DELETE FROM started WHERE group_id = 'g6'")
    assert "g6" in offenders(run_dir, Check.ACCOUNTING)


@pytest.mark.parametrize("group_id", ["g0", "g3", "g9"])
def test_a_started_group_that_vanished_is_reported(run_dir, group_id):
    plant(
        run_dir,
        f"DELETE FROM consumed WHERE finished_seq IN (SELECT finished_seq FROM groups WHERE group_id = '{group_id}')",
        f"DELETE FROM groups WHERE group_id = '{group_id}'",
        f"DELETE FROM started WHERE group_id = '{group_id}'",
    )
    assert any(f"started_seq {int(group_id[1]) + 1}" in offender for offender in offenders(run_dir, Check.ACCOUNTING))


def test_a_finished_group_whose_rows_vanished_is_reported(run_dir):
    plant(run_dir, "DELETE FROM groups WHERE group_id = 'g6'")
    assert offenders(run_dir, Check.ACCOUNTING) == ["finished_seq 8"]


def test_a_group_that_both_failed_without_a_trace_and_finished_is_reported(run_dir):
    plant(run_dir, "INSERT INTO ended VALUES ('ghost', 'failed', 'none', 0)")
    assert offenders(run_dir, Check.ACCOUNTING) == ["ghost"]


def test_a_use_by_a_step_that_is_not_recorded_is_reported(run_dir):
    plant(run_dir, "DELETE FROM steps WHERE step = 2")
    assert offenders(run_dir, Check.ACCOUNTING) == ["finished_seq 5", "finished_seq 6"]


def test_bytes_that_are_no_rollout_are_reported(run_dir):
    plant(run_dir, ("UPDATE rollouts SET body = ? WHERE finished_seq = 2 AND position = 1", (b"\x01nonsense",)))
    assert offenders(run_dir, Check.READABLE) == ["g1/1"]


@pytest.mark.parametrize("positions", [(0,), (1,), (1, 2), (0, 2)])
def test_rollouts_that_vanished_before_others_of_their_group_are_reported(run_dir, positions):
    gone = ", ".join(map(str, positions))
    plant(run_dir, "INSERT INTO rollouts SELECT finished_seq, position + 2, body FROM rollouts WHERE finished_seq = 8")
    plant(run_dir, f"DELETE FROM rollouts WHERE finished_seq = 8 AND position IN ({gone})")
    assert offenders(run_dir, Check.READABLE) == [f"g6/{positions[0]}"]
    plant(run_dir, "UPDATE rollouts SET body = x'01' WHERE finished_seq = 8 AND position = 3")
    assert "g6/3" in offenders(run_dir, Check.READABLE), "the others keep their names"


@pytest.mark.parametrize("archived", [False, True])
def test_a_last_rollout_that_vanished_from_its_group_is_reported(run_dir, archived):
    plant(run_dir, "DELETE FROM rollouts WHERE finished_seq = 2 AND position = 1")
    if archived:
        asyncio.run(with_archive(run_dir))
    assert offenders(run_dir, Check.READABLE) == ["g1/1"]


def test_a_dropped_group_whose_rollouts_all_vanished_is_reported(run_dir):
    plant(run_dir, "DELETE FROM rollouts WHERE finished_seq IN (SELECT finished_seq FROM groups WHERE group_id = 'g8')")
    assert offenders(run_dir, Check.READABLE) == ["g8"]


@pytest.mark.parametrize("archived", [False, True])
def test_a_log_of_groups_without_their_sizes_is_read_and_goes_on(run_dir, archived):
    """As an older Shoal wrote them, into log and archive."""
    if archived:
        asyncio.run(with_archive(run_dir))
        (file,) = (run_dir / "archive").iterdir()
        without_sizes(file)
    plant(run_dir, "ALTER TABLE groups DROP COLUMN size")
    before = audit(run_dir)
    assert before.ok, before.sentences()

    async def go_on():
        buffer = open_buffer(run_dir, META, resume=True)
        await run_group(buffer, "g10")
        await train(buffer, 3, 3)
        await buffer.close()

    asyncio.run(go_on())
    after = audit(run_dir)
    assert (after.ok, after.rollouts) == (True, before.rollouts + 2), after.sentences()
    plant(run_dir, "DELETE FROM rollouts WHERE finished_seq = 9 AND position = 1")
    assert offenders(run_dir, Check.READABLE) == ["g10/1"]


def test_bytes_that_are_no_task_are_reported(run_dir):
    plant(run_dir, ("UPDATE groups SET task = ? WHERE finished_seq = 2", (b"\x01nonsense",)))
    assert offenders(run_dir, Check.READABLE) == ["g1"]
    assert any("g1: task: " in sentence for sentence in audit(run_dir).sentences())


def test_every_offence_is_counted_and_the_first_hundred_are_named(tmp_path):
    async def main():
        buffer = open_buffer(
            tmp_path, RunMeta(max_staleness=0, late="drop", groups_per_step=60, push_every=1), max_running=60
        )
        for i in range(60):
            await run_group(buffer, f"g{i}")
        await buffer.close()

    asyncio.run(main())
    plant_rollout(tmp_path, "g", logprobs=[1.0, 1.0])
    finding = audit(tmp_path).findings[Check.LOGPROBS]
    assert (finding.count, len(finding.ids)) == (120, KEPT_IDS)


def test_with_train_late_groups_are_measured_and_no_offence(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path, RunMeta(max_staleness=0, late="train", groups_per_step=1, push_every=1))
        await run_group(buffer, "late")
        late = buffer._waiting.pop()
        for step in range(5):
            buffer.gate.accepted = step
            await run_group(buffer, f"g{step}")
            await train(buffer, step, step, n=1)
        buffer._waiting.append(late)
        await train(buffer, 5, 5, n=1)
        await buffer.close()

    asyncio.run(main())
    findings = audit(tmp_path).findings
    assert Check.STALENESS not in findings
    assert audit(tmp_path).staleness_max == 5


def test_groups_taken_in_two_rounds_for_one_step_are_in_order(tmp_path):
    """A later round may find an older group that was not there in the first."""

    async def main():
        buffer = open_buffer(tmp_path, RunMeta(max_staleness=1, late="drop", groups_per_step=2, push_every=1))
        await buffer.admit("slow", "chain_sum")
        buffer.on_loaded(1)
        await run_group(buffer, "quick")
        await buffer.take(1, 1)
        await buffer.add(group("slow", (0, 0)))
        await buffer.take(1, 1)
        await buffer.consumed(0, 1, ["quick", "slow"], version_after=2)
        await buffer.close()

    asyncio.run(main())
    assert Check.OLDEST_FIRST not in audit(tmp_path).findings


def test_reading_a_run_that_has_ended_leaves_no_file_beside_it(run_dir):
    before = sorted(os.listdir(run_dir))
    assert audit(run_dir).ok
    assert sorted(os.listdir(run_dir)) == before


def test_a_reader_of_an_ended_run_hears_that_it_was_resumed_meanwhile(run_dir):
    async def resumed():
        buffer = open_buffer(run_dir, RunMeta(2, "drop", 2, 1), resume=True)
        await run_group(buffer, "late")
        await buffer.close()

    with pytest.raises(RunDirError, match="read it again"), snapshot(run_dir):
        asyncio.run(resumed())


def test_a_directory_without_a_run_is_one_clear_sentence(tmp_path):
    with pytest.raises(RunDirError, match="holds no run"):
        audit(tmp_path)
    assert not os.listdir(tmp_path)


def test_a_log_that_lost_everything_is_told_from_one_that_never_held_anything(tmp_path):
    (tmp_path / FILE).write_bytes(b"")
    with pytest.raises(RunDirError, match="is empty: the run was killed while it was created"):
        audit(tmp_path)
    (checkpoint.begin(tmp_path, 3) / "weights").write_text("w")
    checkpoint.seal(tmp_path, 3)
    with pytest.raises(LogBehind, match="has no step, but a checkpoint holds step 3"):
        audit(tmp_path)
