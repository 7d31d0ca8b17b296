"""What the buffer promises to generation, to training and to a resumed run."""

import asyncio
import resource
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from buffer_values import META, group, masked_rows, open_buffer, run_group, train
from shoal import wire
from shoal.errors import RunDirError
from shoal.experience.balance import PATIENCE_S
from shoal.experience.buffer import STALE, TOO_FEW, Buffer
from shoal.experience.counts import task_counts
from shoal.experience.log import FILE, insert_started, insert_step, open_log
from shoal.experience.schema import ConsumedGroup, RunMeta, StepRecord
from shoal.experience.writer import LogWriter
from shoal.rehearsal.clock import run_virtual
from shoal.types import Message, Role


def rows(run_dir, query):
    connection = sqlite3.connect(run_dir / FILE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_a_group_is_on_disk_before_it_can_be_taken(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        taker = asyncio.create_task(buffer.take(1, 0))
        await run_group(buffer, "a")
        (taken,) = await taker
        assert rows(tmp_path, "SELECT group_id FROM groups") == [("a",)]
        await buffer.close()
        return taken

    assert asyncio.run(main()) == group("a")


def test_groups_with_the_oldest_token_come_first_then_those_committed_first(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        for group_id, version in [("b", 1), ("d", 2), ("c", 1), ("a", 0)]:
            await run_group(buffer, group_id, (version, 3))
        taken = await buffer.take(4, 1)
        await buffer.close()
        return [g.id for g in taken]

    assert asyncio.run(main()) == ["a", "b", "c", "d"]


async def test_take_waits_until_enough_groups_are_there(tmp_path):
    buffer = open_buffer(tmp_path)
    taker = asyncio.create_task(buffer.take(2, 0))
    await run_group(buffer, "a")
    await asyncio.sleep(0.01)
    assert not taker.done()
    await run_group(buffer, "b")
    assert [g.id for g in await taker] == ["a", "b"]
    await buffer.close()


def test_a_step_waits_no_longer_than_its_patience_for_a_task_that_is_silent_and_again_once_it_delivered():
    async def main():
        buffer = Buffer.in_memory(META, max_running=64)
        buffer.balance(lambda used, groups: dict.fromkeys(("chain_sum", "gcd"), (sum(used.values()) + groups) / 2))
        loop, took = asyncio.get_running_loop(), []
        for step, service in enumerate(("chain_sum", "gcd", "chain_sum")):
            for name in (f"{step}-a", f"{step}-b"):
                await run_group(buffer, name, service=service)
            began = loop.time()
            assert await train(buffer, step, step) == [f"{step}-a", f"{step}-b"]
            took.append(loop.time() - began)
        return took

    assert run_virtual(main()) == [PATIENCE_S, 0.0, PATIENCE_S]


def test_a_group_older_than_eta_is_dropped_counted_and_its_budget_freed(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        await run_group(buffer, "old", (0, 2), service="slow")
        await run_group(buffer, "new", (1, 2))
        accepted = buffer.gate.accepted
        (taken,) = await buffer.take(1, 2)
        assert taken.id == "new"
        assert buffer.gate.accepted == accepted - 1
        assert buffer.counts["slow"].dropped == {STALE: 1}
        assert buffer.wasted_tokens == {"slow": 4}  # two rollouts of two tokens
        await buffer.close()

    asyncio.run(main())
    assert task_counts(tmp_path)["slow"].dropped == {STALE: 1}


def test_with_mask_tokens_late_groups_are_given_unless_no_token_is_left(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path, RunMeta(1, "mask_tokens", 2, 1))
        await run_group(buffer, "all late", (0, 0))
        for name in ("partly late", "nothing to teach"):
            await run_group(buffer, name, (0, 2))
        useful, idle = await buffer.take(2, 2)
        trained = {**masked_rows([useful], bound=1), **masked_rows([idle], bound=1, value=0.0)}
        await buffer.consumed(0, 2, [useful.id, idle.id], version_after=3, rows=trained)
        await buffer.close()
        return [useful.id, idle.id]

    assert asyncio.run(main()) == ["partly late", "nothing to teach"]
    assert rows(tmp_path, "SELECT trained_from, masked_tokens FROM consumed") == [(2, 2), (None, 2)]


def test_with_train_every_group_is_given(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path, RunMeta(1, "train", 2, 1))
        await run_group(buffer, "a", (0, 0))
        (taken,) = await buffer.take(1, 9)
        await buffer.close()
        return taken.id

    assert asyncio.run(main()) == "a"


def test_a_group_of_which_half_failed_is_kept_in_the_log_and_never_offered(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        assert not await run_group(buffer, "half", size=4, failed=2)
        assert await run_group(buffer, "more", size=4, failed=1)
        assert buffer.waiting == 1
        assert (buffer.gate.accepted, buffer.gate.running) == (1, 0)
        await buffer.close()

    asyncio.run(main())
    assert task_counts(tmp_path)["chain_sum"].failed == {TOO_FEW: 1}
    assert rows(tmp_path, "SELECT COUNT(*) FROM rollouts") == [(8,)]


def test_admission_waits_for_budget_and_serves_who_came_first(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path, RunMeta(0, "drop", 1, 1))
        await run_group(buffer, "a")
        order = []

        async def starter(group_id):
            order.append((group_id, await buffer.admit(group_id, "chain_sum")))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(starter("b"))
            tasks.create_task(starter("c"))
            await asyncio.sleep(0.01)
            assert order == []
            await train(buffer, 0, 0, n=1)
            await asyncio.sleep(0.01)
            assert order == [("b", 1)]
            await buffer.fail("b", "service down")
        await buffer.close()
        return order

    assert asyncio.run(main()) == [("b", 1), ("c", 1)]


def test_a_starter_cancelled_while_being_admitted_gives_its_place_to_the_next(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path, RunMeta(0, "drop", 1, 1))
        await buffer.admit("a", "chain_sum")
        second = asyncio.create_task(buffer.admit("b", "chain_sum"))
        third = asyncio.create_task(buffer.admit("c", "chain_sum"))
        fourth = asyncio.create_task(buffer.admit("d", "chain_sum"))
        await asyncio.sleep(0)
        second.cancel()
        failing = asyncio.create_task(buffer.fail("a", "gone"))
        await asyncio.sleep(0)  # the gate admits c here, before c has run again
        third.cancel()
        await failing
        assert await fourth == 0
        assert buffer.gate.running == 1
        await buffer.close()

    asyncio.run(main())
    assert task_counts(tmp_path)["chain_sum"].started == 2


def test_a_group_is_offered_even_if_who_adds_it_is_cancelled(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        adding = asyncio.create_task(run_group(buffer, "a"))
        await asyncio.sleep(0)
        adding.cancel()
        (taken,) = await buffer.take(1, 0)
        await buffer.close()
        return taken.id

    assert asyncio.run(main()) == "a"


def test_a_cancelled_take_loses_nothing(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        taker = asyncio.create_task(buffer.take(1, 0))
        await asyncio.sleep(0)
        taker.cancel()
        await run_group(buffer, "a")
        assert buffer.waiting == 1
        (taken,) = await buffer.take(1, 0)
        await buffer.close()
        return taken.id

    assert asyncio.run(main()) == "a"


async def test_a_group_cannot_be_consumed_twice(tmp_path):
    buffer = open_buffer(tmp_path)
    await run_group(buffer, "a")
    await buffer.take(1, 0)
    with pytest.raises(ValueError, match="named twice"):
        await buffer.consumed(0, 0, ["a", "a"], version_after=1)
    await buffer.consumed(0, 0, ["a"], version_after=1)
    with pytest.raises(ValueError, match="used before"):
        await buffer.consumed(1, 0, ["a"], version_after=1)
    await buffer.close()


def test_the_log_itself_refuses_a_second_use_and_the_use_of_a_dropped_group(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        for group_id in "abcd":
            await run_group(buffer, group_id)
        await train(buffer, 0, 0)
        await buffer.take(2, 1)
        await buffer.drop(["c"], "uninformative")
        assert task_counts(tmp_path)["chain_sum"].dropped == {"uninformative": 1}, "it is durable"
        await buffer.close()

    asyncio.run(main())
    connection = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    for seq in (1, 3):
        connection.execute("BEGIN")
        with pytest.raises(sqlite3.IntegrityError):
            insert_step(connection, StepRecord(1, 1, 2), [ConsumedGroup(4, 4, 0), ConsumedGroup(seq, 4, 0)])
        connection.execute("ROLLBACK")
    connection.close()
    assert rows(tmp_path, "SELECT finished_seq FROM consumed") == [(1,), (2,)]


async def test_a_group_taken_for_one_version_is_not_consumed_under_another(tmp_path):
    buffer = open_buffer(tmp_path)
    await run_group(buffer, "a")
    await buffer.take(1, 0)
    with pytest.raises(ValueError, match="another version"):
        await buffer.consumed(0, 5, ["a"], version_after=5)
    await buffer.close()


async def test_groups_that_never_started_or_ended_before_are_refused(tmp_path):
    buffer = open_buffer(tmp_path)
    with pytest.raises(ValueError, match="never admitted"):
        await buffer.add(group("x"))
    await buffer.admit("a", "chain_sum")
    with pytest.raises(ValueError, match="running already"):
        await buffer.admit("a", "chain_sum")
    await buffer.fail("a", "no")
    with pytest.raises(ValueError, match="has ended"):
        await buffer.fail("a", "no")
    await buffer.close()


def test_a_resumed_run_offers_what_waited_and_ends_what_was_in_flight(tmp_path):
    async def first():
        buffer = open_buffer(tmp_path)
        for group_id in "abcd":
            await run_group(buffer, group_id)
        await train(buffer, 0, 0)
        await buffer.take(1, 1)  # c is taken and never consumed
        await buffer.admit("e", "chain_sum")
        await buffer.close()
        with closing(sqlite3.connect(tmp_path / "log.sqlite")) as connection:
            connection.execute("DROP TABLE turns")  # as in logs of earlier commits

    async def second():
        buffer = open_buffer(tmp_path, resume=True)
        assert buffer.recovered.last_step == 0
        assert buffer.recovered.version == 1
        assert (buffer.recovered.waiting, buffer.recovered.interrupted) == (2, 1)
        assert (buffer.gate.version, buffer.gate.accepted, buffer.gate.running) == (1, 4, 0)
        assert [g.id for g in await buffer.groups_of(0)] == ["a", "b"]
        assert [(s.step, s.version, s.version_after) for s in await buffer.steps_after()] == [(0, 0, 1)]
        assert await buffer.steps_after(0) == []
        ids = await train(buffer, 1, 1)
        await buffer.close()
        return ids

    asyncio.run(first())
    assert asyncio.run(second()) == ["c", "d"]
    counts = task_counts(tmp_path)["chain_sum"]
    assert (counts.started, counts.finished, counts.consumed, counts.in_flight) == (5, 4, 4, 0)
    assert counts.dropped == {"interrupted": 1}


async def test_groups_handed_to_a_loop_of_the_users_own_are_used_and_their_answers_forgotten(tmp_path):
    buffer = open_buffer(tmp_path)
    for group_id in "abc":
        await run_group(buffer, group_id)
    await buffer.hand_out([one.id for one in await buffer.take(2, 0)], 0)
    assert await buffer.steps_after() == [StepRecord(0, 0, 0)]
    assert rows(tmp_path, "SELECT DISTINCT finished_seq FROM rollouts") == [(3,)], "only of what still waits"
    await buffer.close()


async def test_replayed_groups_equal_those_that_were_trained(tmp_path):
    buffer = open_buffer(tmp_path)
    for group_id in "ab":
        await run_group(buffer, group_id, (0, 1), size=3, failed=1)
    groups = await buffer.take(2, 1)
    await buffer.consumed(0, 1, [g.id for g in reversed(groups)], version_after=2)
    assert await buffer.groups_of(0) == groups[::-1]
    await buffer.close()


async def test_a_replay_that_gives_other_weights_is_noticed(tmp_path):
    buffer = open_buffer(tmp_path)
    assert await buffer.record_version(1, "aa")
    assert await buffer.record_version(1, "aa")
    assert not await buffer.record_version(1, "bb")
    assert await buffer.record_weights(3, "aa")
    assert not await buffer.record_weights(3, "bb")
    assert await buffer.record_weights(4, "bb")
    await buffer.close()


def test_an_existing_run_is_refused_without_resume_and_left_as_it_was(tmp_path):
    asyncio.run(open_buffer(tmp_path).close())
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(RunDirError, match="--resume"):
        open_buffer(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_run_cannot_go_on_under_another_bound(tmp_path):
    asyncio.run(open_buffer(tmp_path).close())
    with pytest.raises(RunDirError, match=r"asynchrony\.max_staleness = 1; it cannot go on with 3"):
        open_buffer(tmp_path, RunMeta(3, "drop", 2, 1), resume=True)


def test_two_processes_cannot_write_one_run(tmp_path):
    buffer = open_buffer(tmp_path)
    with pytest.raises(RunDirError, match="another process"):
        open_buffer(tmp_path, resume=True)
    asyncio.run(buffer.close())


def test_a_file_that_is_no_log_is_one_clear_sentence(tmp_path):
    (tmp_path / FILE).write_bytes(b"hello" * 1000)
    with pytest.raises(RunDirError, match="is not a log"):
        open_buffer(tmp_path, resume=True)


def test_a_log_that_finds_no_room_when_it_is_opened_is_called_no_other_thing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(RunDirError, match=r"cannot be written: .*; free space, then --resume"):
            open_buffer(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    asyncio.run(open_buffer(tmp_path, resume=True).close())


def test_a_log_cut_off_while_it_was_created_starts_over(tmp_path):
    (tmp_path / FILE).write_bytes(b"")
    buffer = open_buffer(tmp_path, resume=True)
    assert buffer.recovered.last_step is None
    asyncio.run(buffer.close())


async def test_when_the_log_cannot_be_written_everybody_who_waits_hears_of_it(tmp_path):
    buffer = open_buffer(tmp_path, RunMeta(0, "drop", 1, 1))
    await buffer.admit("a", "chain_sum")
    taker = asyncio.create_task(buffer.take(1, 0))
    starter = asyncio.create_task(buffer.admit("b", "chain_sum"))
    await asyncio.sleep(0)
    raw = sqlite3.connect(tmp_path / FILE)
    raw.execute("DROP TABLE groups")
    raw.close()
    with pytest.raises(RunDirError, match="cannot be written"):
        await buffer.add(group("a"))
    for waiting in (taker, starter):
        with pytest.raises(RunDirError, match="cannot be written"):
            await asyncio.wait_for(waiting, 5)
    with pytest.raises(RunDirError, match="cannot be written"):
        await buffer.admit("c", "chain_sum")
    await buffer.close()


def test_counts_of_each_task_are_found_again_in_the_log(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        for step in range(3):
            await run_group(buffer, f"{step}-a")
            await run_group(buffer, f"{step}-b", service="gcd")
            await buffer.admit(f"{step}-c", "gcd")
            await buffer.fail(f"{step}-c", "timed out")
            await train(buffer, step, step)
        await buffer.close()
        return buffer.counts

    counts = asyncio.run(main())
    assert task_counts(tmp_path) == counts


async def test_a_buffer_in_memory_writes_at_once():
    buffer = Buffer.in_memory(META, max_running=4)
    adding = run_group(buffer, "a")
    with pytest.raises(StopIteration):  # no suspension: a virtual clock sees no thread
        adding.send(None)
    assert buffer.waiting == 1
    await buffer.sync()
    await buffer.close()


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path):
    def halfway(connection):
        insert_started(connection, "a", "chain_sum", (0, -1))
        raise ValueError("the disk went away")

    async def main():
        failures = []
        writer = LogWriter(open_log(tmp_path, META, resume=False), on_failure=failures.append)
        with pytest.raises(ValueError, match="went away"):
            await writer.commit(halfway)
        await writer.close()
        assert len(failures) == 1

    asyncio.run(main())
    assert rows(tmp_path, "SELECT * FROM started") == []


async def test_a_mistake_of_ours_is_not_called_a_full_disk(tmp_path):
    buffer = open_buffer(tmp_path)
    await run_group(buffer, "a")
    with pytest.raises(sqlite3.IntegrityError):
        await run_group(buffer, "a")
    await buffer.close()


async def test_whatever_was_logged_can_be_read_again(tmp_path):
    long = replace(group("a").rollouts[0], messages=(Message(Role.USER, "x" * (wire.MAX_BYTES + 1)),))

    buffer = open_buffer(tmp_path)
    await buffer.admit("a", "chain_sum")
    await buffer.add(replace(group("a"), rollouts=(long,)))
    await buffer.close()
    buffer = open_buffer(tmp_path, resume=True)
    assert buffer.recovered.waiting == 1
    await buffer.close()


def test_what_a_posted_write_returns_is_freed_by_the_thread_that_writes(tmp_path):
    """A cursor freed elsewhere resets the statement that the next write uses: SQLite calls that misuse, seldom."""
    freed = []

    class Returned:
        def __del__(self):
            freed.append(threading.current_thread())

    async def main():
        writer = LogWriter(open_log(tmp_path, META, resume=False), on_failure=freed.append)
        for _ in range(8):
            writer.post(lambda connection: Returned())
        await writer.sync()
        await writer.close()

    asyncio.run(main())
    assert len(freed) == 8
    assert all(thread.name.startswith("log-writer") for thread in freed)
