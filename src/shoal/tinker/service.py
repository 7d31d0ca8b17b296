"""Work of the Tinker server: durable requests with their futures, samples, and checkpoints whose time ends.

An exception ends only its own request: it is the error of the future.
"""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.named_models import NumberedWeights
from shoal.errors import RequestRefused
from shoal.model.renderer_loading import load_renderer
from shoal.tinker.engines import BaseEngines
from shoal.tinker.futures import Futures, stored
from shoal.tinker.models_trainer import ServerSettings, Trainers
from shoal.tinker.requests import MOST_SAMPLES, SampleBody
from shoal.tinker.sampling import sample
from shoal.tinker.store import KEPT_S, SavedWeights, Store, StoredRequest
from shoal.tinker.training import OnStep, Training

EXPIRY_CHECK_S = 60.0


class TinkerService:
    """Futures of training and sampling requests. Use it as an async context manager."""

    def __init__(
        self,
        settings: ServerSettings,
        on_step: OnStep | None = None,
        numbers: NumberedWeights | None = None,
        trainers: Trainers | None = None,
    ) -> None:
        """`on_step` gets each optimizer step of each model with its numbers: loss, tokens, grad_norm and lr.

        Engines of other hosts pull weights by `numbers`. Without `trainers` a process of this host trains.
        """
        self.settings = settings
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

    def _enqueue(self, request: StoredRequest) -> None:
        if request.kind == "sample":
            self._tasks.create_task(self._answer_sample(request))
        else:
            self._training.add(request)

    async def _answer_sample(self, request: StoredRequest) -> None:
        try:
            self.futures.resolve(request, await self._sampled(request))
        except Exception as error:  # of one request: raised here, it would end the service of all
            self.futures.resolve(request, error)

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
            for checkpoint in self.store.expired(time.time()):
                self.remove(checkpoint)
            self.store.forget(time.time() - KEPT_S)
            await asyncio.sleep(EXPIRY_CHECK_S)

    def remove(self, checkpoint: SavedWeights) -> None:
        """Removes a checkpoint and its files."""
        self.store.remove_checkpoint(checkpoint.path)
        shutil.rmtree(checkpoint.folder, ignore_errors=True)


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
