"""Engines that sample from a base model: a pool, and processes of this host that start when a request needs one."""

import asyncio
import math
from pathlib import Path

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.members import PATIENCE_S
from shoal.engine.pool.named_models import NamedModel, NumberedWeights
from shoal.engine.server.launch import EngineChild, engine_child
from shoal.tinker.models_trainer import ServerSettings

START_TIMEOUT_S = 300.0


class BaseEngines:
    """Pool of the engines of one base model; engines of other hosts join it and leave it."""

    def __init__(
        self, base: Path, settings: ServerSettings, numbers: NumberedWeights, tasks: asyncio.TaskGroup
    ) -> None:
        """At most `settings.engines` processes of this host run at once, as tasks of the group."""
        patience_s = PATIENCE_S if settings.engines else math.inf  # engines of other hosts may come much later
        self.pool = EnginePool(initial=base, numbers=numbers, patience_s=patience_s)
        self._base, self._settings, self._tasks = base, settings, tasks
        self._own: set[str] = set()
        self._starting = asyncio.Lock()

    async def model(self, folder: Path | None) -> NamedModel:
        """Model of the weights or of the adapter in a folder, or the base model.

        Starts an engine when none serves it and one may start. Raises `ChildDied` when that ends in its start.
        """
        model = await asyncio.to_thread(NamedModel.at, folder)
        if not self.pool.serves(model):
            async with self._starting:
                if len(self._own) < self._settings.engines and not self.pool.serves(model):
                    await self._start()
        return model

    async def _start(self) -> None:
        name = next(name for n in range(self._settings.engines) if (name := f"engine-{n}") not in self._own)
        started = asyncio.get_running_loop().create_future()
        self._own.add(name)
        self._tasks.create_task(self._keep(name, started), name=f"keeping {name}")
        await started

    async def _keep(self, name: str, started: "asyncio.Future[None]") -> None:
        """Runs an engine process, and another one when it ends while requests wait."""
        try:
            while not started.done() or self.pool.waiting:
                async with self._child() as child:
                    await self.pool.join(name, await child.serving(START_TIMEOUT_S))
                    try:
                        if not started.done():
                            started.set_result(None)
                        await child.died()
                    finally:
                        await self.pool.leave(name)
        except Exception as error:  # of requests for this base: raised here, it would end the service of all
            if not started.done():
                started.set_exception(error)
        finally:
            self._own.discard(name)
            started.cancel()

    def _child(self) -> EngineChild:
        settings = self._settings
        return engine_child(
            self._base,
            EngineConfig(),
            ModelConfig(path=str(self._base), dtype=settings.dtype),
            max_model_len=None,
            threads=settings.threads,
            log=settings.folder / "engine.log",
            weights=settings.folder,
        )
