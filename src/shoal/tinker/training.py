"""Training requests of the Tinker server: each model's in order, and recovery after any end.

A model's state is its last state on disk and the requests since. After the trainer process or the server ends, the
state is loaded and the requests are repeated, each once; results that clients already have do not change. A model that
cannot be restored fails its own requests.
"""

import asyncio
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from shoal.errors import ChildDied, EngineError, RequestRefused
from shoal.files import ADAPTER_FILE
from shoal.tinker.data import gradient_of, output_of
from shoal.tinker.futures import Futures, stored
from shoal.tinker.models_trainer import ModelsTrainer, ServerSettings, Trainers
from shoal.tinker.store import Sampler, SavedWeights, Store, StoredModel, StoredRequest
from shoal.trainer.messages import (
    Adam,
    Close,
    Gradient,
    LoadCheckpoint,
    SaveCheckpoint,
    TrainerFailed,
    WriteVersion,
)

STATE_SHARE = 0.05
"""Share of the time that writing states may take; restarting takes longer when it is written less often."""
MOST_UNNAMED = 4
"""Sampler weights of one session that no path names and that stay on disk; older ones are removed."""
MOST_TOGETHER, MOST_TOGETHER_BYTES = 8, 24 << 20
"""Limits of a joint pass: models, and bytes of their requests unless a single one has more."""
MOST_DEATHS = 4
"""Trainers that may end at the taking up of one model before it is left out."""
SAVES = ("save", "save_for_sampler")
"""Requests that change nothing in the trainer."""
OnStep = Callable[[str, int, Mapping[str, float]], None]


class Saving(msgspec.Struct):
    """Stored body of a request that saves weights."""

    path: str = ""
    sampler_id: str | None = None
    ttl_seconds: int | None = None


class LoadBody(msgspec.Struct):
    """Stored body of a request that loads a checkpoint; `path` is the client's."""

    path: str
    folder: str
    optimizer: bool


class Training:
    """Queues of the models' requests, and the trainer that carries them out."""

    def __init__(
        self,
        store: Store,
        settings: ServerSettings,
        futures: Futures,
        trainers: Trainers | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        """`on_step` gets each optimizer step of each model with its numbers."""
        self._store, self._folder = store, settings.folder
        self._trainer = ModelsTrainer(settings, trainers)
        self._futures, self._on_step = futures, on_step
        self._queues: dict[str, deque[StoredRequest]] = {}  # the model whose turn it is first
        self._arrived = asyncio.Event()
        self._sums: dict[str, dict[str, float]] = {}  # of the gradients that the next step of a model takes
        self._lost: dict[str, str] = {}  # models that could not be taken up, and why
        self._written: dict[str, tuple[float, float]] = {}  # model: when its state was written, and how long it took

    def add(self, request: StoredRequest) -> None:
        """Takes a request that is stored."""
        self._queues.setdefault(request.target, deque()).append(request)
        self._arrived.set()

    async def run(self) -> None:
        """Carries out the requests, each model's in order; gradients of several models together."""
        async with self._trainer.stack:
            await self._start_trainer()
            while True:
                await self._next()

    async def _next(self) -> None:
        """Carries out the next requests: models take turns, so that one waits for no other's whole queue."""
        heads = [queue[0] for queue in self._queues.values()]
        if not heads:
            self._arrived.clear()
            await self._arrived.wait()
            return
        batch = heads[:1]
        if batch[0].kind == "forward_backward":
            together = [r for r in heads if r.kind == "forward_backward"][:MOST_TOGETHER]
            sizes = accumulate(len(request.body) for request in together)
            batch = [r for r, size in zip(together, sizes, strict=True) if r is batch[0] or size < MOST_TOGETHER_BYTES]
        await self._trained(batch)
        for request in batch:
            queue = self._queues.pop(request.target)
            queue.popleft()
            if queue:
                self._queues[request.target] = queue  # behind the other models'

    async def _trained(self, batch: Sequence[StoredRequest]) -> None:
        """Carries out requests together; alone and on a new trainer when that fails for another reason than theirs."""
        try:
            await self._attempt([request for request in batch if await self._is_due(request)])
        except Exception as error:  # of these requests: raised here, it would end the service of all
            if batch[0].kind in SAVES and not isinstance(error, ChildDied):
                await self._futures.resolve(batch[0], error)
                return
            await self._start_trainer()  # half-done work of a request ends with its trainer
            for request in batch:
                try:
                    await self._attempt([request] if await self._is_due(request) else [])
                except Exception as error:
                    await self._futures.resolve(request, error)
                    await self._start_trainer()

    async def _is_due(self, request: StoredRequest) -> bool:
        """Whether a request is still pending; fails the request of a lost model."""
        now = self._store.request(request.id)
        if now is None or now.state != "pending":
            return False
        why = self._lost.get(request.target)
        if why is None or request.kind == "unload":
            return True
        words = f"model_id: {request.target} cannot be taken up: {why}; load one of its checkpoints"
        await self._futures.resolve(request, EngineError(words))
        return False

    async def _attempt(self, batch: Sequence[StoredRequest]) -> None:
        if not batch:
            return
        if batch[0].kind == "forward_backward":
            await self._accumulate(batch)
            return
        (request,) = batch
        model = self._store.model(request.target)
        assert model is not None
        try:
            result, state = await self._carried_out(model, request)
        except RequestRefused as error:
            await self._futures.resolve(request, error)
            return
        with self._store.together():  # a finished request is in the state, or is repeated after it
            if state is not None:
                self._store.set_state(model.id, str(state), request.number)
            self._store.resolve(request.id, result, repeats=request.kind == "optim_step" and state is None)
        self._futures.set(request.id)
        if state is not None and model.folder.startswith(str(state.parent)):
            await asyncio.to_thread(shutil.rmtree, model.folder, ignore_errors=True)

    async def _accumulate(self, batch: Sequence[StoredRequest]) -> None:
        """Has gradients computed together; a request that is wrong ends only itself."""
        jobs: list[tuple[StoredRequest, Gradient]] = []
        for request in batch:
            try:
                jobs.append((request, await self._gradient(request)))
            except Exception as error:
                await self._futures.resolve(request, error)
        for (request, job), part in zip(jobs, await self._trainer.accumulate([job for _, job in jobs]), strict=True):
            if isinstance(part, TrainerFailed):
                await self._futures.resolve(request, RequestRefused(part.reason))
                continue
            if job.backward:
                sums = self._sums.setdefault(request.target, {"loss": 0.0, "tokens": 0.0})
                sums["loss"] += part.loss
                sums["tokens"] += sum(datum.shape[0] for datum in job.data)
            output = await asyncio.to_thread(output_of, job, part)
            await self._futures.resolve(request, output, repeats=job.backward)

    async def _gradient(self, request: StoredRequest) -> Gradient:
        """Checked gradient of a request. Raises `RequestRefused`."""
        return await asyncio.to_thread(gradient_of, request.body, self._trainer.updates.get(request.target, 0))

    async def _carried_out(self, model: StoredModel, request: StoredRequest) -> tuple[bytes, Path | None]:
        """Carries out one request in the trainer process; its result, and the folder of the state that contains it."""
        match request.kind:
            case "create":
                await self._check_there(model.folder)
                await self._trainer.open(model)
                kind = "load_weights" if model.folder else "create_model"
                state = await self._state(model.id, request.number) if model.folder else None
                return msgspec.json.encode({"model_id": model.id, "type": kind}), state
            case "unload":
                await self._trainer.ask(Close(model.id))
                self._store.close_model(model.id)
                await asyncio.to_thread(shutil.rmtree, self._folder / "states" / model.id, ignore_errors=True)
                return msgspec.json.encode({"model_id": model.id, "type": "unload_model"}), None
            case "optim_step":
                adam = stored(request, Adam)
                norm, updates = await self._trainer.update(model.id, adam), self._trainer.updates[model.id]
                if self._on_step is not None:
                    values = {"grad_norm": norm, "lr": adam.learning_rate, **self._sums.pop(model.id, {})}
                    self._on_step(model.id, updates, values)
                at, took = self._written.get(model.id, (0.0, 0.0))
                due = time.monotonic() - at >= took / STATE_SHARE
                metrics = {
                    "unclipped_grad_l2:mean": norm,
                    "learning_rate": adam.learning_rate,
                    "version": float(updates),
                }
                state = await self._state(model.id, request.number) if due else None
                return msgspec.json.encode({"metrics": metrics}), state
            case "load":
                loaded = stored(request, LoadBody)
                await self._check_there(loaded.folder)
                await self._trainer.ask(LoadCheckpoint(loaded.folder, model.id, loaded.optimizer))
                result = msgspec.json.encode({"path": loaded.path, "model_id": model.id, "type": "load_weights"})
                return result, await self._state(model.id, request.number)
            case _:
                return await self._saved(model, request), None

    async def _saved(self, model: StoredModel, request: StoredRequest) -> bytes:
        """Saves weights: a state to train on from, named sampler weights, or unnamed ones with their sampler."""
        given = stored(request, Saving)
        served = request.kind == "save_for_sampler"
        folder = self._folder / "weights" / model.id / str(request.number)
        if given.sampler_id is not None:
            taken = self._store.sampler(given.sampler_id)
            if taken is not None and taken.folder != str(folder):
                raise RequestRefused(f"sampling_session_seq_id: {given.sampler_id} exists; give each sampler a number")
        await self._written_to(folder, model.id, served=served)
        version = self._trainer.updates[model.id]
        if given.sampler_id is not None:
            sampler = Sampler(given.sampler_id, model.session, model.base, "", str(folder), version)
            self._store.add_sampler(sampler)
            await self._remove_loose(model.session)
            return msgspec.json.encode({"sampling_session_id": given.sampler_id, "type": "save_weights_for_sampler"})
        size = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in folder.iterdir()))
        kind = "sampler" if served else "training"
        now = time.time()
        expires = None if given.ttl_seconds is None else now + given.ttl_seconds
        before = self._store.add_checkpoint(
            SavedWeights(given.path, model.id, kind, str(folder), now, size, version, expires)
        )
        if before not in ("", str(folder)):
            sessions = self._store.sessions_of(before)
            for session in sessions:
                await self._remove_loose(session)
            if not sessions:
                await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
        return msgspec.json.encode(
            {"path": given.path, "type": "save_weights_for_sampler" if served else "save_weights"}
        )

    async def _written_to(self, folder: Path, model: str, *, served: bool) -> None:
        """Has the trainer write a state or sampler weights into a new folder, atomically."""
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)
        await asyncio.to_thread(unfinished.mkdir, parents=True)
        try:
            adapter = WriteVersion(str(unfinished / ADAPTER_FILE), push=False, name=model)
            await self._trainer.ask(adapter if served else SaveCheckpoint(str(unfinished), name=model))
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.to_thread(unfinished.rename, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)

    async def _check_there(self, folder: str) -> None:
        if folder and not await asyncio.to_thread(Path(folder).is_dir):
            raise RequestRefused("path: the checkpoint was removed, or saved anew, after this request was sent")

    async def _remove_loose(self, session: str) -> None:
        """Removes sampler weights without a path, except those of each session's newest samplers."""
        for folder in self._store.loose(session)[:-MOST_UNNAMED]:
            others = self._store.sessions_of(folder)
            if all(folder not in self._store.loose(other)[-MOST_UNNAMED:] for other in others):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _state(self, model: str, number: int) -> Path:
        """Writes the state that contains every request up to `number`, which must be an optimizer step or a load."""
        began = time.monotonic()
        folder = self._folder / "states" / model / str(number)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        try:
            await self._trainer.ask(SaveCheckpoint(str(folder), name=model))
        except RequestRefused as error:  # the trainer has carried out the request: only another one is without it
            raise EngineError(str(error)) from None
        self._written[model] = time.monotonic(), time.monotonic() - began
        return folder

    async def _start_trainer(self) -> None:
        """Takes a new trainer, and brings every model to where it was; one that ends trainers is left out."""
        self._lost.clear()
        deaths = Counter[str]()
        while True:
            taken = ""
            try:
                await self._trainer.start()  # a trainer that cannot start is not the models' fault
                for model in self._store.models():
                    taken = model.id
                    if not model.closed and taken not in self._lost:
                        await self._taken_up(model)
            except ChildDied as error:
                deaths[taken] += 1
                if taken and deaths[taken] == MOST_DEATHS:
                    self._lost[taken] = str(error)
                elif not taken and not self._trainer.replaced:
                    raise
            else:
                return

    async def _taken_up(self, model: StoredModel) -> None:
        """Takes a model up, or keeps why it cannot be; raises `ChildDied`."""
        try:
            await self._take_up(model)
        except ChildDied:
            raise
        except Exception as error:  # of one model: raised here, it would end the service of all
            self._lost[model.id] = f"{type(error).__name__}: {error}"
            await self._trainer.ask(Close(model.id))

    async def _take_up(self, model: StoredModel) -> None:
        """Opens a model from its state on disk, and repeats the requests since."""
        created = self._store.request(f"{model.id}/0")
        if created is None or created.state != "done":
            return
        await self._trainer.open(model)
        gradients: list[StoredRequest] = []
        for request in self._store.repeated(model):
            if request.kind == "forward_backward" and request.state == "done":
                gradients.append(request)
            elif request.kind == "optim_step":
                if request.state == "done":
                    await self._add(gradients)
                    await self._trainer.update(model.id, stored(request, Adam))
                gradients = []  # a step that was refused cleared the gradient
        await self._add(gradients)

    async def _add(self, gradients: Sequence[StoredRequest]) -> None:
        for request in gradients:
            (part,) = await self._trainer.accumulate([await self._gradient(request)])
            if isinstance(part, TrainerFailed):
                raise RequestRefused(part.reason)
