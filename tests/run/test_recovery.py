"""A run goes on from what is intact, is refused where it would train twice, and needs no more disk than before."""

import asyncio
import json
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_values import group, open_buffer, run_group, train
from shoal.config import parse
from shoal.errors import LogBehind, RunDirError
from shoal.experience import checkpoint
from shoal.experience.audit import Check, audit
from shoal.experience.buffer import Buffer
from shoal.experience.log import FILE
from shoal.files import MODEL_FILE as WEIGHTS
from shoal.observe.metrics import JsonlTracker, Record, Trackers
from shoal.run.policy import Policy
from shoal.run.result import RunTotals
from shoal.run.run_dir import open_buffer as recovery_buffer
from shoal.run.run_dir import run_meta
from shoal.run.training import HOUR_S, MOST_RANK_GROUPS, LostGroups, opened_run, recover
from shoal.weights.store import WeightStore

CONFIG = parse({"tasks": [{"name": "gcd"}], "train": {"groups_per_step": 1}, "asynchrony": {"max_staleness": 1}})


async def run_steps(run_dir: Path, first: int, last: int, *, resume: bool = False, save: int | None = None) -> None:
    """A run of one group per step, which saves a checkpoint after one of them."""
    buffer = Buffer.open(run_dir, run_meta(CONFIG), max_running=9, resume=resume)
    for step in range(first, last):
        await run_group(buffer, f"g{step}")
        await train(buffer, step, step, n=1)
        await buffer.record_version(step + 1, str(step + 1))
        if step == save:
            (checkpoint.begin(run_dir, step) / "weights").write_text(str(step))
            await buffer.sync()
            checkpoint.seal(run_dir, step)
    await buffer.close()


def test_a_log_that_lost_steps_of_a_checkpoint_is_refused_is_an_event_and_is_found(tmp_path: Path) -> None:
    asyncio.run(run_steps(tmp_path, 0, 3, save=2))
    shutil.copy(tmp_path / FILE, tmp_path / "older")
    asyncio.run(run_steps(tmp_path, 3, 6, resume=True, save=5))
    shutil.move(tmp_path / "older", tmp_path / FILE)
    assert audit(tmp_path).findings[Check.CHECKPOINTS].ids == ["step-5"]
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(LogBehind, match="ends with step 2, but a checkpoint holds step 5"):
        recovery_buffer(tmp_path, run_meta(CONFIG), max_running=9, resume=True)
    assert (tmp_path / FILE).read_bytes() == before
    (record,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["name"] == "log_behind_checkpoint"
    shutil.rmtree(tmp_path / "checkpoints" / "step-5")
    asyncio.run(open_buffer(tmp_path, run_meta(CONFIG), resume=True).close())


def test_what_is_left_of_steps_that_the_log_lost_goes_at_a_resume_and_is_an_event(tmp_path: Path) -> None:
    asyncio.run(run_steps(tmp_path, 0, 3, save=2))
    shutil.copy(tmp_path / FILE, tmp_path / "older")
    asyncio.run(run_steps(tmp_path, 3, 6, resume=True))
    shutil.move(tmp_path / "older", tmp_path / FILE)
    config = CONFIG.model_copy(update={"run_dir": str(tmp_path)})
    with closing(JsonlTracker(tmp_path / "metrics.jsonl")) as metrics:
        for step in range(1, 7):
            metrics.log(step, {"reward": 1.0})
            metrics.write("eval", {"step": step})
            metrics.write("event", {"name": "said", "step": step})
    for name in ("held_out/000003.jsonl.gz", "held_out/000005.jsonl.gz", "tokens/000006.1.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    async def opened() -> None:
        async with opened_run(config, (), resume=True) as (buffer, _):
            assert buffer.recovered.last_step == 2

    for _ in range(2):
        asyncio.run(opened())
        records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3]
        assert [record["step"] for record in records if record["kind"] == "eval"] == [1, 2, 3]
        assert [record["step"] for record in records if record.get("name") == "said"] == [1, 2, 3, 4, 5, 6]
        (lost,) = [record["reason"] for record in records if record.get("name") == "steps_lost"]
        assert lost == "the log lacks 3 steps that metrics.jsonl had; they are trained anew"
        left = sorted(path.name for folder in ("held_out", "tokens") for path in (tmp_path / folder).iterdir())
        assert left == ["000003.jsonl.gz"]


LATE: Record = {"staleness_max": 1}


def test_times_and_rates_of_a_resumed_run_cover_all_its_processes() -> None:
    """Two steps of two seconds each; the third came after the log's end and is computed again."""
    steps: list[Record] = [
        {"kind": "step", "time_s": 10.0 + 2 * step, "step": step, "step_s": 2.0, "samples_per_s": 4.0 * step, **LATE}
        for step in (1, 2, 3)
    ]
    totals = RunTotals.earlier([{"kind": "event", "time_s": 9.0, "name": "machine"}, *steps], 2)
    assert (totals.wall_s, totals.trained_s, totals.samples) == (16.0, 4.0, 24.0)
    old = RunTotals.earlier([{"kind": "step", "time_s": 3.0, "step": 1, "samples_per_s": 4.0, **LATE}], 1)
    assert (old.wall_s, old.trained_s, old.samples) == (3.0, 0.0, 0.0), "a run of an earlier Shoal"


def test_an_empty_log_beside_a_checkpoint_is_refused(tmp_path: Path) -> None:
    asyncio.run(run_steps(tmp_path, 0, 1, save=0))
    (tmp_path / FILE).write_bytes(b"")
    for refused in (audit, lambda run_dir: open_buffer(run_dir, run_meta(CONFIG), resume=True)):
        with pytest.raises(LogBehind, match="has no step"):
            refused(tmp_path)


async def test_at_a_checkpoint_the_log_is_whole_without_its_write_ahead_log(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await run_group(buffer, "a")
    await train(buffer, 0, 0, n=1)
    await buffer.sync()
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / FILE, alone)
    assert audit(alone).consumed == 1
    await buffer.close()


async def test_another_programs_lock_is_waited_out_and_told(tmp_path: Path) -> None:
    heard: list[bool] = []
    locked = asyncio.Event()
    buffer = open_buffer(tmp_path)

    def hear(lock: bool) -> None:
        heard.append(lock)
        locked.set()

    buffer.on_locked(hear)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    adding = asyncio.create_task(run_group(buffer, "a"))
    await asyncio.wait_for(locked.wait(), 120)
    assert not adding.done()
    other.execute("ROLLBACK")
    other.close()
    assert await adding
    assert heard == [True, False]
    await buffer.close()


def test_the_lock_of_another_program_and_its_end_are_events_of_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        heard: list[str] = []
        locked = asyncio.Event()

        def hear(record: Record) -> None:
            heard.append(str(record.get("name")))
            locked.set()

        config = CONFIG.model_copy(update={"run_dir": str(tmp_path / "run")})
        async with opened_run(config, [hear], resume=False) as (buffer, _):
            other = sqlite3.connect(tmp_path / "run" / FILE, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            adding = asyncio.create_task(run_group(buffer, "a"))
            await asyncio.wait_for(locked.wait(), 120)
            assert heard == ["log_locked"]
            other.execute("ROLLBACK")
            other.close()
            assert await adding
            assert heard == ["log_locked", "log_unlocked"]

    asyncio.run(main())
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["name"] for record in records] == ["log_locked", "log_unlocked"]


async def test_a_run_that_ends_waits_for_no_lock(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    locked = asyncio.Event()
    buffer.on_locked(lambda lock: locked.set())
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    adding = asyncio.create_task(run_group(buffer, "a"))
    await asyncio.wait_for(locked.wait(), 120)
    await asyncio.wait_for(buffer.close(), 120)
    with pytest.raises(RunDirError, match="end the program that locks it"):
        await adding
    other.close()


async def test_what_a_run_writes_of_others_texts_is_its_users_alone(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await buffer.admit("a", "chain_sum")
    await buffer.add(group("a"))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob(f"{FILE}*")}  # noqa: ASYNC240
    assert set(modes.values()) == {0o600}, modes
    await buffer.close()


class Replaying:
    """A trainer whose weights are the number of steps it trained; says how much was on the disk when it wrote."""

    def __init__(self, store: Path) -> None:
        self.store, self.trained, self.pushes, self.most = store, 0, 0, 0
        self.loaded = ""

    async def load(self, directory: Path) -> float:
        self.loaded = directory.name
        self.trained = int((directory / "weights").read_text()) + 1
        return 0.0

    async def step(self, rows: object, version: int, since_push: int, *, tokens_file: object) -> SimpleNamespace:
        self.trained += 1
        return SimpleNamespace(weights=str(self.trained))

    async def write_version(self, path: Path | None, *, push: bool = True, later: bool = False) -> float:
        self.pushes += push
        if path is not None:
            path.write_text(str(self.trained))  # noqa: ASYNC240
        self.most = max(self.most, len(list(self.store.glob("v*/model.safetensors"))))
        return 0.0


class Serving:
    """An engine that remembers what it was given to serve."""

    served: tuple[int, str] | None = None

    async def update_weights(self, version: int, path: Path) -> None:
        self.served = version, path.read_text()  # noqa: ASYNC240


def recovered(run_dir: Path) -> tuple[Replaying, Serving, list[str]]:
    """What recovering does to a trainer and an engine, and the events it tells."""
    store, engine = WeightStore(run_dir / "weights"), Serving()
    trainer = Replaying(run_dir / "weights")

    async def main() -> None:
        buffer = Buffer.open(run_dir, run_meta(CONFIG), max_running=9, resume=True)
        trackers = Trackers(JsonlTracker(run_dir / "metrics.jsonl"))
        parts: dict[str, Any] = {"engine": engine, "trainer": trainer, "buffer": buffer, "store": store}
        prepared: Any = SimpleNamespace(config=CONFIG, version_file=WEIGHTS)
        more: dict[str, Any] = dict.fromkeys(("runner", "scorer", "engines", "draw"))
        await recover(Policy(CONFIG, prepared=prepared, teacher=None, **parts, **more), run_dir, trackers)
        trackers.close()
        await buffer.close()

    asyncio.run(main())
    events = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return trainer, engine, [event["name"] for event in events]


def test_a_resume_writes_the_weights_that_are_served_and_no_others(tmp_path: Path) -> None:
    asyncio.run(run_steps(tmp_path, 0, 9, save=1))
    store = WeightStore(tmp_path / "weights")
    for version in (7, 8, 9, 12):  # two of them served, one written and one of a log that was lost
        (store.begin(version) / "model.safetensors").write_text(str(version))
        store.seal(version)
    (store.begin(10) / "model.safetensors").write_text("half")
    trainer, engine, events = recovered(tmp_path)
    assert (trainer.trained, trainer.pushes) == (9, 7)
    assert engine.served == (9, "9")
    assert trainer.most <= 2
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v9"]
    assert "resumed" in events


def test_an_older_intact_checkpoint_is_gone_on_from_when_the_newest_is_damaged(tmp_path: Path) -> None:
    asyncio.run(run_steps(tmp_path, 0, 4, save=1))
    asyncio.run(run_steps(tmp_path, 4, 9, resume=True, save=6))
    (tmp_path / "checkpoints" / "step-6" / "weights").write_text("7")
    trainer, engine, events = recovered(tmp_path)
    assert trainer.loaded == "step-1"
    assert trainer.trained == 9
    assert engine.served == (9, "9")
    assert events.count("checkpoint_damaged") == 1


def test_groups_of_ranks_may_be_lost_for_ever_and_not_many_in_an_hour() -> None:
    now_s = [0.0]
    lost = LostGroups(lambda: now_s[0])
    for _ in range(10 * MOST_RANK_GROUPS):
        now_s[0] += HOUR_S / MOST_RANK_GROUPS
        assert lost.may_go_on()
    now_s[0] += HOUR_S
    assert [lost.may_go_on() for _ in range(MOST_RANK_GROUPS + 1)] == [True] * MOST_RANK_GROUPS + [False]
