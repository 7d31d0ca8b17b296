"""Work of the Tinker server: requests in order for each model, their futures, and recovery after any end.

A model's state is its last state on disk and the requests since. When the trainer process or the server ends, both are
taken up again: gradients and optimizer steps after the state on disk are computed anew, each once, and results that
clients were given stay as they are.
"""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from shoal.errors import ChildDied, EngineError, EngineUnavailable, RequestRefused, ShoalError
from shoal.model.renderer_loading import load_renderer
from shoal.tinker import messages as m
from shoal.tinker.samplers import NumberedWeights, Samplers
from shoal.tinker.sampling import sample
from shoal.tinker.store import KEPT_S, Sampler, SavedWeights, Store, StoredModel, StoredRequest
from shoal.tinker.trainer import ModelsTrainer, Trainers, carried_out, local_trainer

STATE_SHARE = 0.05
"""Share of the time that writing states may take; restarting takes longer when it is written less often."""
MOST_UNNAMED = 4
"""Unnamed sampler weights of one session that stay on disk; older ones are removed."""
EXPIRY_CHECK_S = 60.0
MOST_TRIES = 4
"""Engines of which one sampling request is asked, where they end amid it."""
MOST_TOGETHER = 8
"""Models whose gradients are computed together."""


@dataclass(frozen=True)
class ServerSettings:
    """Models by name, the folder of all that the server keeps, and the shares of the machine."""

    bases: Mapping[str, Path]
    folder: Path
    engines: int = 2
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"


class TinkerService:
    """Futures of training and sampling requests. Use it as an async context manager."""

    def __init__(
        self,
        settings: ServerSettings,
        on_step: Callable[[str, int, Mapping[str, float]], None] | None = None,
        numbered: NumberedWeights | None = None,
        trainers: Trainers | None = None,
    ) -> None:
        """`on_step` gets each optimizer step of each model with its numbers: loss, tokens, grad_norm and lr.

        Joined engines pull weights by the numbers of `numbered`. Without `trainers` a process of this host trains.
        """
        self.settings, self._on_step = settings, on_step
        self._sums: dict[str, dict[str, float]] = {}  # of the gradients that the next step of a model takes
        self.store = Store(settings.folder / "server.sqlite")
        self.renderers = {name: load_renderer(path) for name, path in settings.bases.items()}
        self.samplers = Samplers(
            settings.bases,
            settings.folder,
            numbered or NumberedWeights(),
            most=settings.engines,
            threads=settings.threads,
            dtype=settings.dtype,
        )
        self._trainers = trainers or partial(
            local_trainer,
            settings.bases,
            settings.folder / "trainer.log",
            threads=settings.threads,
            dtype=settings.dtype,
            device=settings.device,
        )
        self._queues: dict[str, deque[StoredRequest]] = {}
        self._arrived = asyncio.Event()
        self._resolved: dict[str, asyncio.Event] = {}
        self._written: dict[str, tuple[float, float]] = {}  # model: when its state was written, and how long it took
        self._trainer: ModelsTrainer | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        for request in self.store.pending():
            self._enqueue(request)
        self._background = [self._tasks.create_task(self._work()), self._tasks.create_task(self._expire())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks._abort()  # type: ignore[attr-defined]
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self.samplers.aclose()
            self.store.close()

    def submit(self, id_: str, target: str, kind: str, body: bytes) -> str:
        """Takes a request durably and returns its id; a second submission of an id is the first one's future."""
        request, new = self.store.add_request(id_, target, kind, body)
        if new:
            self._enqueue(request)
        return request.id

    async def result(self, id_: str, timeout_s: float) -> StoredRequest | None:
        """A request with its result, or still pending after the timeout; None for an id that nobody submitted."""
        request = self.store.request(id_)
        if request is not None and request.state == "pending":
            event = self._resolved.setdefault(id_, asyncio.Event())
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                return request
            request = self.store.request(id_)
        return request

    def _enqueue(self, request: StoredRequest) -> None:
        if request.kind == "sample":
            self._tasks.create_task(self._answer_sample(request))
            return
        self._queues.setdefault(request.target, deque()).append(request)
        self._arrived.set()

    async def _work(self) -> None:
        """Carries out the training requests, each model's in order; gradients of several models together."""
        async with self._stack:
            await self._start_trainer()
            while True:
                await self._next()

    async def _next(self) -> None:
        """Carries out the next requests."""
        heads = sorted((queue[0] for queue in self._queues.values()), key=lambda request: request.number)
        if not heads:
            self._arrived.clear()
            await self._arrived.wait()
            return
        kind = heads[0].kind
        batch = [r for r in heads if r.kind == kind][:MOST_TOGETHER] if kind == "forward_backward" else heads[:1]
        await self._trained(batch)
        for request in batch:
            queue = self._queues[request.target]
            queue.popleft()
            if not queue:
                del self._queues[request.target]

    async def _trained(self, batch: Sequence[StoredRequest]) -> None:
        """Carries out requests together; alone and on a new trainer when that fails for another reason than theirs."""
        try:
            await self._attempt(batch)
        except (ChildDied, EngineError):
            await self._start_trainer()
            for request in batch:
                try:
                    await self._attempt([request])
                except (ChildDied, EngineError) as error:
                    self._resolve(request, error)
                    await self._start_trainer()

    async def _attempt(self, batch: Sequence[StoredRequest]) -> None:
        if batch[0].kind == "forward_backward":
            done = await self._ask(m.ForwardBackward(tuple(request.body for request in batch)))
            for request, part in zip(batch, done.parts, strict=True):
                if isinstance(part, m.CarriedOut):
                    sums = self._sums.setdefault(request.target, {})
                    sums.update({name: sums.get(name, 0.0) + value for name, value in part.metrics.items()})
                self._resolve(request, RequestRefused(part.reason) if isinstance(part, m.Failed) else part.body)
            return
        (request,) = batch
        model = self.store.model(request.target)
        assert model is not None
        try:
            result, state = await self._carried_out(model, request)
        except RequestRefused as error:
            self._resolve(request, error)
            return
        with self.store.together():  # a request whose result is known is in the state, or follows it
            if state is not None:
                self.store.set_state(model.id, str(state), request.number)
            self.store.resolve(request.id, result)
        self._resolved.pop(request.id, asyncio.Event()).set()
        if state is not None and model.folder.startswith(str(state.parent)):
            await asyncio.to_thread(shutil.rmtree, model.folder, ignore_errors=True)

    def _resolve(self, request: StoredRequest, result: bytes | ShoalError) -> None:
        if isinstance(result, bytes):
            self.store.resolve(request.id, result)
        else:
            category = "user" if isinstance(result, RequestRefused) else "server"
            self.store.resolve(request.id, _json({"error": str(result), "category": category}), failed=True)
        self._resolved.pop(request.id, asyncio.Event()).set()

    async def _answer_sample(self, request: StoredRequest) -> None:
        try:
            self._resolve(request, await self._sampled(request))
        except ShoalError as error:
            self._resolve(request, error)

    async def _sampled(self, request: StoredRequest) -> bytes:
        wanted = types.SampleRequest.model_validate_json(request.body)
        sampler = self.store.sampler(request.target)
        assert sampler is not None
        weights = Path(sampler.folder) if sampler.folder else None
        if weights is not None and not await asyncio.to_thread(weights.exists):
            raise RequestRefused(f"sampler {sampler.id}: its weights were removed; save them again, or under a name")
        for attempt in range(1, MOST_TRIES + 1):
            try:
                async with self.samplers.engine(sampler.base, weights) as engine:
                    return await sample(engine, self.renderers[sampler.base], wanted)
            except EngineUnavailable:
                if attempt == MOST_TRIES:
                    raise
        raise AssertionError

    async def _carried_out(self, model: StoredModel, request: StoredRequest) -> tuple[bytes, Path | None]:
        """Carries out one request in the trainer process; its result, and the folder of the state that contains it."""
        match request.kind:
            case "create":
                await self._ask(_opened(model))
                kind = "load_weights" if model.folder else "create_model"
                state = await self._state(model.id, request.number) if model.folder else None
                return _json({"model_id": model.id, "type": kind}), state
            case "unload":
                await self._ask(m.Close(model.id))
                self.store.close_model(model.id)
                await asyncio.to_thread(shutil.rmtree, self.settings.folder / "states" / model.id, ignore_errors=True)
                return _json({"model_id": model.id, "type": "unload_model"}), None
            case "optim_step":
                done = await self._ask(m.OptimStep(model.id, msgspec.json.decode(request.body, type=m.Adam)))
                if self._on_step is not None:
                    norm, lr = done.metrics["unclipped_grad_l2:mean"], done.metrics["learning_rate"]
                    self._on_step(model.id, done.version, {"grad_norm": norm, "lr": lr, **self._sums.pop(model.id, {})})
                at, took = self._written.get(model.id, (0.0, 0.0))
                due = time.monotonic() - at >= took / STATE_SHARE
                return _json({"metrics": done.metrics}), await self._state(model.id, request.number) if due else None
            case "load":
                loaded = msgspec.json.decode(request.body, type=_Load)
                await self._ask(m.Load(model.id, loaded.folder, loaded.optimizer))
                result = _json({"path": loaded.path, "model_id": model.id, "type": "load_weights"})
                return result, await self._state(model.id, request.number)
            case _:
                return await self._saved(model, request), None

    async def _saved(self, model: StoredModel, request: StoredRequest) -> bytes:
        """Saves weights: a state to train on from, named sampler weights, or unnamed ones with their sampler."""
        given = msgspec.json.decode(request.body, type=Saving)
        served = request.kind == "save_for_sampler"
        unnamed = served and given.sampler_id is not None
        folder = self.settings.folder / "weights" / (given.sampler_id or given.folder)
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)
        await asyncio.to_thread(unfinished.mkdir, parents=True)
        done = await self._ask(m.Save(model.id, str(unfinished), served))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.to_thread(unfinished.rename, folder)
        if unnamed:
            assert given.sampler_id is not None
            sampler = Sampler(given.sampler_id, model.session, model.base, "", str(folder), done.version)
            self.store.add_sampler(sampler)
            await asyncio.to_thread(self._remove_older_unnamed, model.session)
            return _json({"sampling_session_id": given.sampler_id, "type": "save_weights_for_sampler"})
        size = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in folder.iterdir()))
        kind = "sampler" if served else "training"
        now = time.time()
        expires = None if given.ttl_seconds is None else now + given.ttl_seconds
        self.store.add_checkpoint(
            SavedWeights(given.path, model.id, kind, str(folder), now, size, done.version, expires)
        )
        return _json({"path": given.path, "type": "save_weights_for_sampler" if served else "save_weights"})

    def _remove_older_unnamed(self, session: str) -> None:
        unnamed = [s for s in self.store.samplers(session) if s.folder and not s.path and Path(s.folder).exists()]
        for sampler in unnamed[:-MOST_UNNAMED]:
            shutil.rmtree(sampler.folder, ignore_errors=True)

    async def _state(self, model: str, number: int) -> Path:
        """Writes the state that contains every request up to `number`, which must be an optimizer step or a load."""
        began = time.monotonic()
        folder = self.settings.folder / "states" / model / str(number)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await self._ask(m.Save(model, str(folder)))
        self._written[model] = time.monotonic(), time.monotonic() - began
        return folder

    async def _start_trainer(self) -> None:
        """Takes a new trainer, and brings every model to where it was."""
        while True:
            await self._stack.aclose()
            self._trainer = await self._stack.enter_async_context(self._trainers())
            try:
                for model in self.store.models():
                    if not model.closed:
                        await self._take_up(model)
            except ChildDied:
                if not self._trainer.replaced:
                    raise
            else:
                return

    async def _take_up(self, model: StoredModel) -> None:
        """Opens a model from its state on disk, and repeats what it was asked since."""
        requests = self.store.requests(model.id)
        if not requests or requests[0].state != "done":
            return
        await self._ask(_opened(model))
        for request in requests[1:]:
            if request.state == "pending":
                return
            if request.number <= model.state_at:
                continue
            if request.kind == "forward_backward" and request.state == "done":
                if not pb.ForwardBackwardRequest.FromString(request.body).forward_only:
                    await self._ask(m.ForwardBackward((request.body,)))
            elif request.kind == "optim_step":
                with contextlib.suppress(RequestRefused):  # as it was the first time: it cleared the gradient
                    await self._ask(m.OptimStep(model.id, msgspec.json.decode(request.body, type=m.Adam)))

    async def _ask(self, request: m.Request) -> m.CarriedOut:
        assert self._trainer is not None
        return await carried_out(self._trainer, request)

    async def _expire(self) -> None:
        """Removes checkpoints whose time is over."""
        while True:
            for checkpoint in self.store.expired(time.time()):
                self.remove(checkpoint)
            self.store.forget(time.time() - KEPT_S)
            await asyncio.sleep(EXPIRY_CHECK_S)

    def remove(self, checkpoint: SavedWeights) -> None:
        """Removes a checkpoint and its files."""
        self.store.remove_checkpoint(checkpoint.path)
        shutil.rmtree(checkpoint.folder, ignore_errors=True)


class Saving(msgspec.Struct):
    """Stored body of a request that saves weights."""

    path: str = ""
    folder: str = ""
    sampler_id: str | None = None
    ttl_seconds: int | None = None


class _Load(msgspec.Struct):
    path: str
    folder: str
    optimizer: bool


def _opened(model: StoredModel) -> m.Open:
    adapter = None if model.adapter is None else msgspec.json.decode(model.adapter, type=m.Adapter)
    return m.Open(model.id, model.base, adapter, model.folder, model.optimizer)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def new_id(kind: str) -> str:
    """Id that nobody can guess."""
    return f"{kind}-{secrets.token_hex(8)}"
