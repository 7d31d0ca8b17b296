"""Faults at any await of the real control code, on a virtual clock: `make rehearsal` runs many seeds.

One seed is one run of a few steps. Its main process is killed between two turns of its event loop, several times, and
goes on from its log. Engines hang, are cut off or lose their weights, and what they hear and say comes late and in
another order; the trainer ends or hangs before or after a step; scorers and disks are slow; the clock jumps. The
trainer keeps the groups of each step, a Version's file names that history, and an engine samples under it, so every
promise is checked against what was done:

    lost         a step, or a group that is not accounted for (`shoal audit`)
    doubled      a group trained twice, or a history that the log does not have
    stale        a row older than the bound when it was trained, or a Version with two histories
    standstills  a deadlock, or a run that took more than a virtual day
"""

import asyncio
import contextlib
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal.config import Config
from shoal.engine.pool.engine_pool import EnginePool
from shoal.errors import ChildDied, EngineUnavailable, ShoalError, StoodStill
from shoal.experience.audit import audit
from shoal.experience.buffer import Buffer
from shoal.interfaces import EngineInfo
from shoal.observe.metrics import JsonlTracker, Trackers
from shoal.rehearsal.clock import NothingCanHappen, VirtualLoop
from shoal.rehearsal.costs import EngineCost, TrainerCost
from shoal.rehearsal.engine import RehearsedEngine
from shoal.rehearsal.rehearse import policy_of
from shoal.rehearsal.scene import Scene
from shoal.rehearsal.trainer import RehearsedTrainer
from shoal.run.loop import RunParts, TrainLoop
from shoal.run.run_dir import groups_at_once, run_meta
from shoal.run.standstill import waits
from shoal.run.training import recover, train_and_evaluate
from shoal.types import Completion, Sample, Sampling, Split

T = TypeVar("T")
History = tuple[tuple[int, ...], ...]
KINDS = ("lost", "doubled", "stale", "standstills")
DAY_S = 86400.0
MOST_LIVES = 5
ENGINES = 2


class Killed(BaseException):
    """End of a process by SIGKILL."""


class MortalLoop(VirtualLoop):
    """Event loop of a process that is killed before a turn, or within one."""

    def __init__(self, dice: random.Random, dies_at: float) -> None:
        super().__init__()
        self._dice, self._left, self.dead = dice, dies_at, False
        self.unrun: list[asyncio.Handle] = []
        """Callbacks of the last turn that the process did not live to run."""
        slow = dice.choice((0.0, 0.0, 0.2, 5.0))
        self.thread_s = lambda: dice.random() * slow
        self._jumps = dice.choice((0.0, 0.0, 0.002))

    def turned(self) -> None:
        self._left -= 1
        if self._left < 0 and not self.dead:
            self.dead = True
            raise Killed
        if self._left < 1 and not self.dead:  # some callbacks of the last turn still run
            ready: Any = self._ready  # type: ignore[attr-defined]
            self.unrun = [ready.pop() for _ in range(self._dice.randint(0, len(ready)))][::-1]
        if self._dice.random() < self._jumps:
            self.jump(self._dice.expovariate(1 / 300))

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        def work(*given: Any) -> T:
            if self.dead:
                raise OSError("the process is gone")
            return func(*given)

        return super().run_in_executor(executor, work, *args)


@dataclass
class World:
    """What outlives a process."""

    run_dir: Path
    config: Config
    served: dict[int, set[History]] = field(default_factory=lambda: defaultdict(set))
    """Histories under which each Version was sampled."""
    violations: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    history: History = ()
    """History of the newest trainer."""
    lives: int = 0
    """Processes so far."""


@dataclass(slots=True)
class HistoryTrainer(RehearsedTrainer):
    """Trainer whose weights are the groups that it was trained on, step by step."""

    world: World = field(kw_only=True)
    dice: random.Random = field(kw_only=True)
    faults: float = field(kw_only=True)
    history: History = ()

    async def _fault(self) -> None:
        if self.dice.random() < self.faults:
            if self.dice.random() < 0.5:
                raise ChildDied("the trainer ended")
            await asyncio.sleep(300 * self.dice.random())

    async def step(  # type: ignore[no-untyped-def]
        self, groups: Sequence[tuple[Sample, ...]], version: int | None = None, since_push: int = 0, **more
    ):
        await self._fault()
        stats = await RehearsedTrainer.step(self, groups, version, since_push, **more)
        assert version is not None
        bound = self.world.config.asynchrony.max_staleness
        for row in (row for group in groups for row in group):
            oldest = min(one for one, sampled in zip(row.versions, row.mask, strict=True) if sampled)
            if not version - bound <= oldest <= version:
                self.world.violations["stale"].append(f"a row of version {oldest} was trained under {version}")
        self.history = (*self.history, tuple(group[0].tokens[0] for group in groups))
        self.world.history = self.history
        await self._fault()
        return stats

    async def write_version(self, path: Path | None, *, push: bool = True, later: bool = False) -> float:
        seconds = await RehearsedTrainer.write_version(self, path, push=push, later=later)
        if path is not None:
            _write(path, self.history)
        return seconds

    async def save(self, directory: Path, *, later: bool = False) -> float:
        _write(directory / "history", self.history)
        return await RehearsedTrainer.save(self, directory, later=later)

    async def load(self, directory: Path) -> float:
        self.history = _history(directory / "history")
        return await RehearsedTrainer.load(self, directory)


def _write(path: Path, history: History) -> None:
    path.write_text(json.dumps(history))


def _history(path: Path) -> History:
    """History in a file; empty for the folder of the first weights."""
    return () if path.is_dir() else tuple(tuple(step) for step in json.loads(path.read_text()))


class FaultyEngine(RehearsedEngine):
    """Engine that hangs, or cannot be reached, at times of its own."""

    def __init__(self, world: World, dice: random.Random) -> None:
        lengths = dice.choice(((5,), (1, 200), (5, 5, 5, 5, 600)))
        cost = EngineCost(0.05, prefill_s=1e-4, load_s=dice.choice((0.0, 1.0)), places=4)
        super().__init__(cost, lambda rng: rng.choice(lengths), 10, 5, 1000)
        self._world, self._dice, self._late_s = world, dice, dice.choice((0.0, 0.0, 0.05, 3.0))
        at, self._faults = 0.0, list[tuple[float, float, bool]]()
        for _ in range(dice.randint(0, 4)):
            at += dice.expovariate(1 / 30)
            ends = at + dice.choice((1.0, 20.0, 100.0, 900.0)) * dice.random()
            self._faults.append((at, ends, dice.random() < 0.5))
            at = ends

    async def _reached(self) -> None:
        """One way of a message: late by chance, so that it comes after a later one."""
        if self._late_s:
            await asyncio.sleep(self._dice.random() * self._late_s)
        now_s = asyncio.get_running_loop().time()
        for began_s, ends_s, hangs in self._faults:
            if began_s <= now_s < ends_s:
                if hangs:
                    await asyncio.sleep(ends_s - now_s)
                raise EngineUnavailable("cut off")

    async def generate(  # type: ignore[no-untyped-def]
        self, prompt_ids: Sequence[int], sampling: Sampling, **more
    ) -> list[Completion]:
        await self._reached()
        answer = await super().generate(prompt_ids, sampling, **more)
        await self._reached()
        return answer

    async def alive(self) -> None:
        await self._reached()

    async def info(self) -> EngineInfo:
        await self._reached()
        return await super().info()

    async def update_weights(self, version: int, path: Path) -> None:
        await self._reached()
        try:
            history = _history(path)
        except FileNotFoundError as error:
            raise EngineUnavailable(str(error)) from error
        await super().update_weights(version, path)
        await self._reached()
        self._world.served[version].add(history)

    def lose(self) -> None:
        """Ends its process; a new one with the weights of Version 0 can be reached a little later."""
        now_s = asyncio.get_running_loop().time()
        self._faults.insert(0, (now_s, now_s + 10, False))
        self.kill()
        self.version = 0


async def life(world: World, dice: random.Random, trainer_faults: float) -> None:
    """One process of a run, from its start to its end."""
    loop, config, run_dir = asyncio.get_running_loop(), world.config, world.run_dir
    resume = (run_dir / "log.sqlite").is_file()
    buffer = Buffer.open(run_dir, run_meta(config), max_running=groups_at_once(config), resume=resume)
    trained_s, slow_s = dice.choice((0.1, 2.0)), dice.choice((0.0, 0.0, 1.0, 60.0))
    cost, trainer_cost = EngineCost(0.05, places=4), TrainerCost(trained_s, 0.0)
    scene = Scene(
        config, cost, ENGINES, trainer_cost, lambda rng: 100, 40, 5, lambda rng: slow_s * rng.random() ** 4, scorers=2
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            pool = EnginePool(initial=run_dir, recovered=buffer.recovered.version)
            engines = [FaultyEngine(world, dice) for _ in range(ENGINES)]
            background = [tasks.create_task(_joined(pool, f"engine-{i}", one)) for i, one in enumerate(engines)]
            background += [tasks.create_task(pool.watch()), tasks.create_task(_losing(engines, dice))]
            trainer = HistoryTrainer(scene.trainer, 5, world=world, dice=dice, faults=trainer_faults)
            with closing(Trackers(JsonlTracker(run_dir / "metrics.jsonl", loop.time))) as trackers:
                async with aclosing(policy_of(scene, run_dir, buffer, pool, trainer, trackers)) as policy:
                    eval_tasks = [policy.prepared.service.draw(Split.EVAL, 0)]
                    parts = RunParts(run_dir, eval_tasks, trackers, clock=loop.time)
                    training = TrainLoop(policy, parts, first_step=buffer.recovered.first_step)
                    await recover(policy, run_dir, trackers)
                    await train_and_evaluate(policy, parts, training)
            for task in background:
                task.cancel()
    finally:
        await buffer.close()


async def _joined(pool: EnginePool, name: str, engine: FaultyEngine) -> None:
    while True:
        try:
            await pool.join(name, engine)
        except ShoalError:
            await asyncio.sleep(1)
        else:
            return


async def _losing(engines: Sequence[FaultyEngine], dice: random.Random) -> None:
    while True:
        await asyncio.sleep(dice.expovariate(1 / 100))
        dice.choice(engines).lose()


def lived(world: World, dice: random.Random, dies_at: float) -> bool:
    """Runs one process; False when it was killed."""
    loop = MortalLoop(dice, dies_at)
    main = loop.create_task(life(world, dice, dice.choice((0.0, 0.03)) if dies_at < float("inf") else 0.0))
    loop.call_later(DAY_S, partial(_too_long, world, main))
    try:
        loop.run_until_complete(main)
    except Killed:
        return False
    except (NothingCanHappen, StoodStill) as error:
        world.violations["standstills"].append(str(error)[:300])
    except BaseExceptionGroup as errors:
        stood, others = errors.split(StoodStill)
        if stood is not None:
            world.violations["standstills"].append(str(_first(stood))[:300])
            return True
        if others is not None and others.split(ShoalError)[1] is not None:
            raise
        return False  # no engine for ten minutes, or a disk: the run says so, and goes on with --resume
    except asyncio.CancelledError:
        pass
    finally:
        loop.dead = True
        _buried(loop)
    return True


def _too_long(world: World, main: asyncio.Task[None]) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(loop, MortalLoop) and loop.dead:
        return
    where = "; ".join(waits(asyncio.get_running_loop()))
    world.violations["standstills"].append(f"a virtual day passed: {where}")
    main.cancel()


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _buried(loop: MortalLoop) -> None:
    """Ends what a dead process left, none of which reaches the disk."""
    loop.set_exception_handler(lambda loop, context: None)
    loop._ready.extend(loop.unrun)  # type: ignore[attr-defined]
    for connection in _connections(loop):
        connection.close()
    for _ in range(20):
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if not left:
            break
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait(left, timeout=5000))
    loop.close()


def _connections(loop: MortalLoop) -> list[Any]:
    """Open logs of a dead process."""
    found = []
    for task in asyncio.all_tasks(loop):
        frame = getattr(task.get_coro(), "cr_frame", None)
        if frame is not None and "buffer" in frame.f_locals and isinstance(frame.f_locals["buffer"], Buffer):
            found.append(frame.f_locals["buffer"]._opened)
    return found


def config_of(dice: random.Random, run_dir: Path) -> Config:
    """A small run."""
    groups = dice.choice((1, 2, 3))
    return Config.model_validate(
        {
            "run_dir": str(run_dir),
            "stall_s": 2000,
            "tasks": [{"name": name} for name in ("ape", "bee")[: dice.choice((1, 2))]],
            "train": {"steps": dice.randint(2, 8), "groups_per_step": groups, "push_every": dice.choice((1, 1, 2))},
            "rollout": {"group_size": 2, "max_tokens": 250},
            "engine": {"max_running": 4, "count": ENGINES},
            "asynchrony": {"max_staleness": dice.choice((0, 1, 3))},
            "eval": {"every_steps": dice.choice((0, 2)), "questions": 1},
            "checkpoint": {"every_steps": dice.choice((1, 2, 3)), "asynchronous": dice.random() < 0.3},
        }
    )


def run_seed(seed: int, folder: Path) -> World:
    """The world after the run of a seed."""
    dice = random.Random(seed)
    run_dir = folder / f"seed-{seed}"
    run_dir.mkdir()
    world = World(run_dir, config_of(dice, run_dir))
    for number in range(2 * MOST_LIVES):
        dies_at = float("inf") if number >= MOST_LIVES else 2 ** dice.uniform(0, 11)
        world.lives += 1
        # Dice of each life: how a dead process is buried decides nothing in the next one.
        if lived(world, random.Random(dice.random()), dies_at):
            break
    _check(world)
    shutil.rmtree(run_dir, ignore_errors=True)
    return world


def _check(world: World) -> None:
    """Compares what was trained with what the log says, and both with the promises."""
    if any(world.violations.values()):
        return
    if len(world.history) != world.config.train.steps:
        world.violations["lost"].append(f"{len(world.history)} steps of {world.config.train.steps}")
    trained = [number for step in world.history for number in step]
    if len(set(trained)) < len(trained) and len(world.config.tasks) == 1:
        world.violations["doubled"].append(f"trained {trained}")
    for check, finding in audit(world.run_dir).findings.items():
        world.violations["lost"].append(f"audit: {check}: {finding}")
    for version, histories in world.served.items():
        length = min(version * world.config.train.push_every, world.config.train.steps)
        if any(one != world.history[: len(one)] or len(one) != length for one in histories):
            world.violations["stale"].append(f"version {version} has {len(histories)} histories: {histories}")
