"""What was moved out of the log is read as if it were still there, whatever is killed meanwhile."""

import asyncio
import sqlite3
import stat
from pathlib import Path

import pytest

from buffer_values import group, open_buffer, run_group, train
from shoal.errors import RunDirError
from shoal.experience import archive
from shoal.experience.audit import audit
from shoal.experience.counts import task_counts
from shoal.experience.export import export_jsonl
from shoal.experience.log import FILE, newest_groups, snapshot
from shoal.experience.schema import RunMeta

META = RunMeta(max_staleness=1, late="drop", groups_per_step=2, push_every=1)
STEPS = 12


async def some_run(run_dir: Path) -> None:
    """Steps of own groups and of a peer's, with failures, drops and groups that are left over."""
    buffer = open_buffer(run_dir, META)
    for step in range(STEPS):
        await run_group(buffer, f"{step}a", size=3)
        await run_group(buffer, f"{step}b", service="gcd", size=4, failed=1)
        await buffer.admit(f"{step}c", "gcd")
        await buffer.fail(f"{step}c", "service down")
        await run_group(buffer, f"{step}d", size=4, failed=3)
        taken = await buffer.take(2, step)
        ids = [one.id for one in taken]
        foreign = [group(f"{step}peer", (step, step), peer="reef")] if step % 3 == 0 else []
        await buffer.consumed(step, step, ids, version_after=step + 1, external=foreign)
        await buffer.record_version(step + 1, f"checksum {step}")
        buffer.on_loaded(step + 1)
    await run_group(buffer, "waits")
    await run_group(buffer, "dropped")
    await buffer.take(2, STEPS)
    await buffer.drop(["dropped"], "uninformative")
    await buffer.admit("runs", "gcd")
    await buffer.close()


def seen(run_dir: Path) -> tuple[object, ...]:
    """All that readers make of a log."""
    report = audit(run_dir)
    assert report.ok, report.sentences()
    export_jsonl(run_dir, run_dir / "rows.jsonl")
    with snapshot(run_dir) as connection:
        known, newest = list(newest_groups(connection, 99, 99)), list(newest_groups(connection, 1, 1))
    own, foreign = ([one for one in known if one.external is external] for external in (False, True))
    assert sorted(one.id for one in newest) == sorted([own[-1].id, foreign[-1].id])
    rows = (run_dir / "rows.jsonl").read_text()
    assert [one.origin.peer_id for one in foreign] == ["reef"] * (STEPS // 3)
    assert task_counts(run_dir)["chain_sum"].external == STEPS // 3
    return report.sentences(), rows, task_counts(run_dir), foreign


async def archived(run_dir: Path, through: int) -> None:
    buffer = open_buffer(run_dir, META, resume=True)
    await buffer.archive(through)
    await buffer.close()


def in_the_log_itself(run_dir: Path, table: str) -> int:
    connection = sqlite3.connect(run_dir / FILE)
    (count,) = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
    connection.close()
    return int(count)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    asyncio.run(some_run(tmp_path))
    asyncio.run(open_buffer(tmp_path, META, resume=True).close())  # what was in flight is interrupted
    return tmp_path


def test_readers_see_the_same_before_and_after_archiving(run_dir: Path) -> None:
    before = seen(run_dir)
    for through in (0, 4, 4, 9):
        asyncio.run(archived(run_dir, through))
        assert seen(run_dir) == before
    assert sorted(path.name for path in (run_dir / "archive").iterdir()) == [
        "steps-0-0.parquet",
        "steps-1-4.parquet",
        "steps-5-9.parquet",
    ]
    assert in_the_log_itself(run_dir, "steps") == 2
    assert in_the_log_itself(run_dir, "rollouts") == 2 * (3 + 4) + 4 + 2 + 2


def test_only_their_owner_reads_the_archive_s_files(run_dir: Path) -> None:
    asyncio.run(archived(run_dir, 9))
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (run_dir / archive.FOLDER).iterdir()}
    assert modes == {0o600}


def test_the_log_gives_its_room_back_to_the_disk(run_dir: Path) -> None:
    async def main() -> tuple[int, int]:
        buffer = open_buffer(run_dir, META, resume=True)
        await run_group(buffer, "long", (STEPS,) * 200_000)
        await train(buffer, STEPS, STEPS, n=2)
        await run_group(buffer, "short")
        await train(buffer, STEPS + 1, STEPS + 1, n=1)
        await buffer.sync()
        before = (run_dir / FILE).stat().st_size
        await buffer.archive(STEPS + 1)  # the newest step stays, whatever is asked for
        assert [record.step for record in await buffer.steps_after(STEPS)] == [STEPS + 1]
        await buffer.sync()
        after = (run_dir / FILE).stat().st_size
        await buffer.close()
        return before, after

    before, after = asyncio.run(main())
    assert after < before / 10


def test_a_crash_between_the_file_and_the_log_loses_nothing_and_doubles_nothing(run_dir: Path) -> None:
    before = seen(run_dir)
    assert archive.write(run_dir, 6) is not None  # and then it was killed
    assert seen(run_dir) == before
    asyncio.run(archived(run_dir, 4))  # another bound than before: the file that was left is read by nobody
    assert seen(run_dir) == before
    assert [file.name for file in (run_dir / archive.FOLDER).iterdir()] == ["steps-0-4.parquet"]
    asyncio.run(archived(run_dir, 9))
    assert seen(run_dir) == before


def test_files_of_others_in_the_archive_s_folder_stay(run_dir: Path) -> None:
    (run_dir / "archive").mkdir()
    (run_dir / "archive" / "notes.txt").write_text("mine")
    asyncio.run(archived(run_dir, 4))
    assert (run_dir / "archive" / "notes.txt").read_text() == "mine"


def test_a_file_is_bounded_in_size_and_no_step_is_split(run_dir: Path) -> None:
    shard = archive.write(run_dir, 9, shard_bytes=1)
    assert shard is not None
    assert (shard.name, shard.rows["steps"], shard.rows["consumed"]) == ("steps-0-0.parquet", 1, 3)
    with snapshot(run_dir) as connection:
        (of_two,) = connection.execute(
            "SELECT SUM(LENGTH(body)) FROM consumed JOIN rollouts USING (finished_seq) WHERE step < 2"
        ).fetchone()
    filled = archive.write(run_dir, 9, shard_bytes=of_two)
    assert filled is not None
    assert filled.name == "steps-0-1.parquet"


@pytest.mark.parametrize(
    "of", ["consumed WHERE step = 3", "groups WHERE finished_seq = 3", "started WHERE group_id = ''"]
)
def test_what_a_step_needs_of_an_archive_is_found_without_reading_all_steps(run_dir: Path, of: str) -> None:
    asyncio.run(archived(run_dir, 8))
    with snapshot(run_dir) as connection:
        plan = [detail for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {of}")]
    assert plan
    assert not [detail for detail in plan if "SCAN" in detail]


def test_a_resumed_run_counts_and_replays_what_was_archived(run_dir: Path) -> None:
    async def recovered() -> tuple[object, ...]:
        buffer = open_buffer(run_dir, META, resume=True)
        steps = await buffer.steps_after()
        found = (
            buffer.recovered,
            buffer.counts,
            (buffer.gate.accepted, buffer.gate.version),
            steps,
            [await buffer.groups_of(record.step) for record in steps],
            await buffer.steps_after(STEPS - 2),
        )
        await buffer.close()
        return found

    before = asyncio.run(recovered())
    asyncio.run(archived(run_dir, 9))
    assert asyncio.run(recovered()) == before


def test_a_run_goes_on_over_an_archive(run_dir: Path) -> None:
    async def main() -> None:
        buffer = open_buffer(run_dir, META, resume=True)
        for step in range(STEPS, STEPS + 6):
            await run_group(buffer, f"{step}a")
            await run_group(buffer, f"{step}b")
            await train(buffer, step, step)
            await buffer.archive(step - 2)
        await buffer.close()

    asyncio.run(main())
    report = audit(run_dir)
    assert report.ok, report.sentences()
    assert report.steps == STEPS + 6


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_archive_is_one_clear_sentence(run_dir: Path, damage: str) -> None:
    asyncio.run(archived(run_dir, 4))
    (file,) = (run_dir / "archive").iterdir()
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[:-100])
    elif damage == "changed":
        file.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    with pytest.raises(RunDirError, match=r"steps-0-4\.parquet"):
        audit(run_dir)


def test_reading_an_ended_run_leaves_no_files_beside_its_log(run_dir: Path) -> None:
    before = {path.name for path in run_dir.iterdir()}
    with snapshot(run_dir) as connection:
        assert connection.execute("SELECT count(*) FROM steps").fetchone()
    assert {path.name for path in run_dir.iterdir()} == before
