"""The engines of a run form one pool, kept full for as long as the run lasts.

    own      `engine.count` processes; one that ends is started again, and serves the newest weights before any request
    remote   `engine.urls`; one that does not answer, or turns out unusable during the run, is asked again and joins
             when it can

The run continues while engines come and go. It ends when none answers for long, or when one cannot be kept alive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.detect_server import connect
from shoal.engine.launch import EngineChild, engine_child
from shoal.engine.pool import EnginePool
from shoal.errors import ChildDied, ConfigError, EngineError, EngineUnavailable, RequestRefused
from shoal.net.process import GRACE_S
from shoal.run.standstill import OwnEngines
from shoal.types import Sampling

START_TIMEOUT_S = 300.0
PATIENCE_S = 600.0  # of a request: longer than the start of a large model takes
SHORT_LIFE_S = 60.0
SHORT_LIVES = 3  # in a row, after which an engine is not started again
ASK_AGAIN_S = 5.0

OnEvent: TypeAlias = Callable[[str], None]
"""Callback that gets a sentence about a lost or missing engine."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that every engine of a run is started with or checked against."""

    engine: EngineConfig
    model: ModelConfig
    model_dir: Path
    max_model_len: int
    sampling: Sampling
    threads: int
    """Cores that all engines of this machine have together."""
    logs: Path
    weights: Path
    """Folder of all Versions of the run."""
    gpus: Sequence[str] = ()
    """GPUs of this run's engine processes, one each; none on the CPU."""
    recovered: int = 0
    """Newest Version of the run so far."""
    ask_again_s: float = ASK_AGAIN_S
    """Seconds until a remote engine that could not join is asked again."""


@asynccontextmanager
async def engines(
    settings: EngineSettings, on_event: OnEvent, own: OwnEngines | None = None
) -> AsyncIterator[EnginePool]:
    """Opens the pool once it has all own engines, or one remote engine.

    Raises `ChildDied` when an engine cannot be started or kept. Raises `ConfigError` for a remote engine that lacks
    what is needed, and `EngineUnavailable` when no remote engine answers.
    """
    pool = EnginePool(patience_s=PATIENCE_S, initial=settings.model_dir, recovered=settings.recovered)
    names = settings.engine.urls or _own_names(settings.engine.count)
    failures: list[str] = []
    keep = (
        _Remote(settings, pool, on_event, failures)
        if settings.engine.urls
        else _Own(settings, pool, on_event, own or OwnEngines())
    ).keep
    ready = [asyncio.Event() for _ in names]
    try:
        async with asyncio.TaskGroup() as tasks:
            keepers = [
                tasks.create_task(keep(name, event), name=f"keeping {name}")
                for name, event in zip(names, ready, strict=True)
            ]
            for event in ready:
                await event.wait()
            if not pool.handles:
                raise EngineUnavailable("; ".join(failures))
            for failure in failures:
                on_event(failure)
            keepers.append(tasks.create_task(pool.watch(), name="watching the engines"))
            yield pool
            for keeper in keepers:
                keeper.cancel()
    finally:
        await pool.aclose()


def _own_names(count: int) -> list[str]:
    return ["engine"] if count == 1 else [f"engine-{i}" for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Own:
    """Keeper of this run's engine processes."""

    settings: EngineSettings
    pool: EnginePool
    on_event: OnEvent
    own: OwnEngines

    async def keep(self, name: str, ready: asyncio.Event) -> None:
        """Restarts the engine whenever it ends. Raises `ChildDied` when it does not stay alive."""
        short_lives = 0
        while True:
            began_s = time.monotonic()
            try:
                how = await self._life(name, ready)
            except ChildDied as error:
                if not ready.is_set():
                    raise
                how = str(error)
            short_lives = short_lives + 1 if time.monotonic() - began_s < SHORT_LIFE_S else 0
            if short_lives == SHORT_LIVES:
                raise ChildDied(f"{how}; it ended {SHORT_LIVES} times within {SHORT_LIFE_S:g} s, go on with --resume")
            self.on_event(how)

    async def _life(self, name: str, ready: asyncio.Event) -> str:
        """Runs one process from start to end; returns how it ended."""
        self.own.starting.add(name)
        async with self._child(name) as child:
            engine = await child.serving(START_TIMEOUT_S)
            ended = asyncio.create_task(child.died(), name=f"{name} process")
            try:
                try:
                    await self.pool.join(name, engine)
                except EngineError as error:  # most likely it is about to end
                    await asyncio.wait([ended], timeout=GRACE_S)
                    return str(ended.result()) if ended.done() else f"{name}: {error}"
                ready.set()
                self.own.starting.discard(name)
                self.own.running[name] = child, engine
                return str(await ended)
            finally:
                self.own.running.pop(name, None)
                ended.cancel()
                await self.pool.leave(name)

    def _child(self, name: str) -> EngineChild:
        settings = self.settings
        return engine_child(
            settings.model_dir,
            settings.engine,
            settings.model,
            max_model_len=settings.max_model_len,
            threads=max(1, settings.threads // settings.engine.count),
            log=settings.logs / f"{name}.log",
            name=name,
            gpu=settings.gpus[_own_names(settings.engine.count).index(name)] if settings.gpus else None,
            weights=settings.weights,
        )


@dataclass(frozen=True, slots=True)
class _Remote:
    """Keeper of remote engines that are not there yet."""

    settings: EngineSettings
    pool: EnginePool
    on_event: OnEvent
    failures: list[str]
    """Failures of engines missing at the start."""

    async def keep(self, url: str, ready: asyncio.Event) -> None:
        """Returns when the engine at `url` has joined; from then on the pool looks after it.

        Raises `ConfigError` or `RequestRefused` for an unusable engine at the start; later, other engines serve the
        run.
        """
        reported = False
        while True:
            try:
                engine = await connect(
                    url,
                    on_update=self.settings.engine.on_update,
                    model_dir=self.settings.model_dir,
                    sampling=self.settings.sampling,
                )
                await self.pool.join(url, engine)
                return
            except EngineUnavailable as error:
                if not ready.is_set():
                    self.failures.append(str(error))
            except (ConfigError, RequestRefused) as error:
                if not ready.is_set():
                    raise
                if not reported:
                    self.on_event(f"{url} cannot join, and is asked again: {error}")
                reported = True
            finally:
                ready.set()
            await asyncio.sleep(self.settings.ask_again_s)
