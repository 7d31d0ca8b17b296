"""Versions leave the step at once: they are hashed, recorded and loaded beside the next one."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from buffer_values import rollout as sampled
from shoal.config import parse
from shoal.files import MODEL_FILE
from shoal.interfaces import Purpose
from shoal.observe.metrics import JsonlTracker, Trackers
from shoal.run.loop import HeldOutEvaluations
from shoal.run.policy import ServedVersions
from shoal.types import Rollout, Task
from shoal.weights.store import WeightStore, WrittenVersion


class HeldStore(WeightStore):
    """Seals nothing until it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.may, self.sealed = threading.Semaphore(0), list[int]()

    def seal(self, version: int) -> WrittenVersion:
        assert self.may.acquire(timeout=60)
        self.sealed.append(version)
        return super().seal(version)


class Writing:
    """A trainer and a log, by what they have."""

    def __init__(self) -> None:
        self.written, self.recorded = list[str](), list[int]()

    async def write_version(self, path: Path, **_: object) -> float:
        path.write_text(path.parent.name)  # noqa: ASYNC240
        self.written.append(path.parent.name)
        return 1.5

    async def record_version(self, version: int, checksum: str) -> bool:
        self.recorded.append(version)
        return True

    def on_loaded(self, version: int) -> None:
        assert version in self.recorded, "the log has a Version before an engine loads it"


class Loading:
    """An engine that says when it has loaded."""

    def __init__(self) -> None:
        self.loaded = asyncio.Queue[int]()

    async def update_weights(self, version: int, path: Path) -> None:
        assert path.read_text() == f"v{version}.unfinished"  # noqa: ASYNC240
        await self.loaded.put(version)


async def test_a_step_does_not_wait_until_its_version_is_hashed_and_the_next_version_does(tmp_path: Path) -> None:
    both: Any = Writing()
    engine: Any = Loading()
    prepared: Any = SimpleNamespace(version_file=MODEL_FILE, config=parse({"tasks": [{"name": "gcd"}]}))
    store = HeldStore(tmp_path)
    versions = ServedVersions(prepared, engine, both, both, store)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(versions.keep_loaded())
        assert await versions.write(1) == 1.5
        versions.load_soon()
        assert versions.number == 1, "the next step trains on the new Version"
        assert both.recorded == store.sealed == []
        second = tasks.create_task(versions.write(2))
        await asyncio.sleep(0)
        assert both.written == ["v1.unfinished"], "one Version is sealed at a time"
        store.may.release(2)
        assert await engine.loaded.get() == 1
        await second
        versions.load_soon()
        assert await engine.loaded.get() == 2
        await versions.loaded()
        keeping.cancel()
    assert both.recorded == store.sealed == [1, 2]


async def test_a_version_of_no_loop_is_sealed_before_it_is_loaded(tmp_path: Path) -> None:
    both: Any = Writing()
    engine: Any = Loading()
    prepared: Any = SimpleNamespace(version_file=MODEL_FILE, config=parse({"tasks": [{"name": "gcd"}]}))
    versions = ServedVersions(prepared, engine, both, both, WeightStore(tmp_path))
    await versions.write(1)
    await versions.load()
    assert (engine.loaded.get_nowait(), both.recorded) == (1, [1])


class Answering:
    """Implements `interfaces.Runner`: answers under the engine's Version, greedily when it is the next one."""

    def __init__(self, store: HeldStore, engine: Loading) -> None:
        self.store, self.engine, self.version = store, engine, 0

    async def rollouts(
        self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN, turns: object = None
    ) -> tuple[Rollout, ...]:
        while not self.engine.loaded.empty():
            self.version = self.engine.loaded.get_nowait()
        began = self.version
        if purpose is Purpose.GREEDY:
            self.store.may.release()
            self.version = await self.engine.loaded.get()
        return (sampled(task.id, (began, self.version)),)


async def test_an_evaluation_begins_with_the_version_of_its_step_and_names_the_later_ones_that_it_met(
    tmp_path: Path,
) -> None:
    both: Any = Writing()
    engine: Any = Loading()
    config = parse({"tasks": [{"name": "gcd"}]})
    prepared: Any = SimpleNamespace(version_file=MODEL_FILE, config=config)
    store = HeldStore(tmp_path)
    versions = ServedVersions(prepared, engine, both, both, store)
    trackers, asked = Trackers(JsonlTracker(tmp_path / "metrics.jsonl")), [Task("t", "gcd", ())]
    runner = Answering(store, engine)
    evaluations = HeldOutEvaluations(config, tmp_path, asked, runner, trackers, [], versions.loaded)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(versions.keep_loaded())
        await versions.write(1)
        versions.load_soon()
        evaluations.start(20, tasks)
        for _ in range(9):
            await asyncio.sleep(0)  # it would ask now, if it did not wait for its Version
        second = tasks.create_task(versions.write(2))
        store.may.release()
        await second
        versions.load_soon()  # before the evaluation has asked, and held back until it does
        await evaluations.ended()
        keeping.cancel()
    trackers.close()
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][:1]
    assert (record["step"], record["version_oldest"], record["version_newest"]) == (20, 1, 2)
