"""Work of the Tinker server: durable requests with their futures, samples, engines, and checkpoints whose time ends.

An exception ends only its own request: it is the error of the future.
"""

import asyncio
import contextlib
import math
import secrets
import shutil
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.members import PATIENCE_S
from shoal.engine.pool.replica import NamedModel, NumberedWeights
from shoal.engine.server.http_client import EngineChild, engine_child
from shoal.errors import RequestRefused
from shoal.model.renderer_loading import load_renderer
from shoal.net.server import Refused
from shoal.tinker.futures import Futures, stored
from shoal.tinker.models_trainer import ServerSettings, Trainers
from shoal.tinker.requests import MOST_SAMPLES, SampleBody
from shoal.tinker.sampling import sample
from shoal.tinker.store import KEPT_S, SavedWeights, Store, StoredModel, StoredRequest
from shoal.tinker.training import OnStep, Training

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


EXPIRY_CHECK_S = 60.0
MOST_OPEN = 64
"""Models of one key that are not unloaded."""
SILENT_S = 3600.0
"""Seconds without a heartbeat or request of a session, after which its models make room for others of the key."""


class TinkerService:
    """Futures of training and sampling requests. Use it as an async context manager."""

    def __init__(
        self,
        settings: ServerSettings,
        on_step: OnStep | None = None,
        numbers: NumberedWeights | None = None,
        trainers: Trainers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_step` gets each optimizer step of each model with its numbers: loss, tokens, grad_norm and lr.

        Engines of other hosts pull weights by `numbers`. Without `trainers` a process of this host trains.
        """
        self.settings, self._clock = settings, clock
        self._began_s, self._heard_s = clock(), dict[str, float]()  # of each session
        self.store = Store(settings.folder / "server.sqlite")
        self.futures = Futures(self.store)
        self.renderers = {name: load_renderer(path) for name, path in settings.bases.items()}
        self._training = Training(self.store, settings, self.futures, trainers, on_step)
        self._drawing: dict[str, _Drawing] = defaultdict(_Drawing)  # by client
        self._tasks, numbers = asyncio.TaskGroup(), numbers or NumberedWeights()
        self._engines = {
            name: BaseEngines(base, settings, numbers, self._tasks) for name, base in settings.bases.items()
        }

    def pool(self, base: str) -> EnginePool:
        """Engines of a base model."""
        return self._engines[base].pool

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for request in self.store.pending():
            self._enqueue(request)
        for work in (self._training.run(), self._expire(), *(one.pool.watch() for one in self._engines.values())):
            self._tasks.create_task(work)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks._abort()  # type: ignore[attr-defined]
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            for engines in self._engines.values():
                await engines.pool.aclose()
            self.store.close()

    def submit(self, id_: str, target: str, kind: str, body: bytes) -> str:
        """Takes a request durably and returns its id; a second submission of an id is the first one's future."""
        request, new = self.store.add_request(id_, target, kind, body)
        if new:
            self._enqueue(request)
        return request.id

    def unload(self, model: StoredModel) -> str:
        """Unloads a model; the id of the future, which is another one after each failure."""
        failed = self.store.failed(model.id, "unload")
        return self.submit(f"{model.id}/unload" + (f"-{failed}" if failed else ""), model.id, "unload", b"")

    def hear(self, session: str) -> None:
        """Notes that a session's client lives."""
        self._heard_s[session] = self._clock()

    def make_room(self, owner: str) -> None:
        """Unloads the model whose session is silent for longest, if a key has its most models. Raises `Refused`."""
        if len(models := self.store.open_models(owner)) < MOST_OPEN:
            return
        heard_s = {model.id: self._heard_s.get(model.session, self._began_s) for model in models}
        silent = min(models, key=lambda model: heard_s[model.id])
        if self._clock() - heard_s[silent.id] < SILENT_S:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, f"expected at most {MOST_OPEN} models of a key; unload one")
        self.unload(silent)

    def _enqueue(self, request: StoredRequest) -> None:
        if request.kind == "sample":
            self._tasks.create_task(self._answer_sample(request))
        else:
            self._training.add(request)

    async def _answer_sample(self, request: StoredRequest) -> None:
        try:
            await self.futures.resolve(request, await self._sampled(request))
        except Exception as error:  # of one request: raised here, it would end the service of all
            await self.futures.resolve(request, error)

    async def _sampled(self, request: StoredRequest) -> bytes:
        wanted = stored(request, SampleBody)
        sampler = self.store.sampler(request.target)
        assert sampler is not None
        if sampler.base not in self.renderers:
            raise RequestRefused(f"sampler {sampler.id}: its base model {sampler.base!r} is no longer served")
        weights = Path(sampler.folder) if sampler.folder else None
        if weights is not None and not await asyncio.to_thread(weights.exists):
            raise RequestRefused(f"sampler {sampler.id}: its weights were removed; save them again, or under a name")
        async with self._drawing[self.store.owner(sampler.session) or ""].room(wanted.num_samples):
            model = await self._engines[sampler.base].model(weights)
            return await sample(self.pool(sampler.base), model, self.renderers[sampler.base], wanted)

    async def _expire(self) -> None:
        """Removes expired checkpoints."""
        while True:
            try:
                for checkpoint in self.store.expired(time.time()):
                    self.remove(checkpoint)
                self.store.forget(time.time() - KEPT_S)
            except sqlite3.Error as error:
                self.store.check_passes(error)  # on a full disk, the removed files make room
            await asyncio.sleep(EXPIRY_CHECK_S)

    def remove(self, checkpoint: SavedWeights) -> None:
        """Removes the files of a checkpoint, and then the checkpoint: on a full disk they make room for that."""
        shutil.rmtree(checkpoint.folder, ignore_errors=True)
        self.store.remove_checkpoint(checkpoint.path)


class _Drawing:
    """Completions that engines sample for one client: so many at once that others find room, first come first served.

    An engine answers 503 to everybody when its queue is full.
    """

    def __init__(self) -> None:
        self._turn, self._free = asyncio.Lock(), asyncio.Semaphore(MOST_SAMPLES)

    @contextlib.asynccontextmanager
    async def room(self, count: int) -> AsyncIterator[None]:
        """Waits for room for so many completions, and has it for as long as the block lasts."""
        taken = 0
        try:
            async with self._turn:
                while taken < count:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


def new_id(kind: str) -> str:
    """Unguessable id."""
    return f"{kind}-{secrets.token_hex(8)}"
