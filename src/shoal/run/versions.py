"""Versions of a policy: the trainer writes each, the log records it, then engines load it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from shoal.engine.pool import canary
from shoal.experience.buffer import Buffer
from shoal.interfaces import Engine
from shoal.run.prepare import Prepared
from shoal.trainer.worker import StepTrainer
from shoal.types import Split
from shoal.weights.store import WeightStore, WrittenVersion

PARITY_BOUND_NATS = {"float32": 1e-3, "bfloat16": 0.1}  # of mean |difference| between engine and trainer
CANARY_TOKENS = 64


class ServedVersions:
    """Writer and loader of Versions. Invariant: the log has a Version before an engine loads it."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine,
        trainer: StepTrainer,
        buffer: Buffer,
        store: WeightStore,
        number: int = 0,
    ) -> None:
        self._prepared, self._store = prepared, store
        self._engine, self._trainer, self._buffer = engine, trainer, buffer
        self._newest: WrittenVersion | None = None
        self._unsealed: int | None = None
        self._sealing, self._to_seal = asyncio.Lock(), asyncio.Event()
        self._to_load = asyncio.Event()
        self._loaded = asyncio.Event()
        self._loaded.set()
        self.number = number
        """The newest Version, whose weights are being trained."""
        self.load_s = 0.0
        """Seconds of the last load."""
        self.on_inexact: Callable[[int], None] = lambda version: None
        """Gets a Version that the log has with another checksum: a replay was not exact."""

    async def write(self, number: int, *, push: bool = True) -> float:
        """Writes the trained weights as Version `number`; returns the trainer's seconds.

        Sealing, which hashes the files, is left to `seal`, so that the next step need not wait for it. `push` counts
        the write as a push. Raises `TrainerError`, `ChildDied` and `RunDirError`.
        """
        await self.seal()
        unfinished = self._store.begin(number)
        config, file = self._prepared.config, unfinished / self._prepared.version_file
        busy_s = await self._trainer.write_version(file, push=push, later=config.checkpoint.asynchronous)
        if config.engine.urls or config.cluster.listen:
            await self._write_canary(unfinished)
        self._unsealed = self.number = number
        self._to_seal.set()
        return busy_s

    async def seal(self) -> None:
        """Seals the Version that was written last and records it, unless that is done. Raises `RunDirError`."""
        async with self._sealing:
            if (number := self._unsealed) is None:
                return
            if self._prepared.config.checkpoint.asynchronous:
                await self._trainer.finish_save(self._store.unfinished(number))
            written = await asyncio.to_thread(self._store.seal, number)
            if not await self._buffer.record_version(number, written.checksum):
                self.on_inexact(number)
            self._newest, self._unsealed = written, None

    async def load(self) -> None:
        """Has engines load the newest Version, then removes older ones."""
        await self.seal()
        written, loop = self._newest, asyncio.get_running_loop()
        assert written is not None, "no Version was written yet"
        began_s = loop.time()
        await self._engine.update_weights(written.version, written.path)
        self.load_s = loop.time() - began_s
        self._buffer.on_loaded(written.version)
        await asyncio.to_thread(self._store.remove_before, written.version)

    def load_soon(self) -> None:
        """Has `keep_loaded` load the newest Version; returns at once."""
        self._loaded.clear()
        self._to_load.set()

    async def keep_loaded(self) -> None:
        """Loads the newest Version after each `load_soon`, until cancelled; seals each while engines load another."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_sealed(), name="sealing versions")
            while True:
                await self._to_load.wait()
                self._to_load.clear()
                await self.load()
                if not self._to_load.is_set():
                    self._loaded.set()

    async def _keep_sealed(self) -> None:
        """Seals each Version as soon as it is written."""
        while True:
            await self._to_seal.wait()
            self._to_seal.clear()
            await self.seal()

    async def loaded(self) -> None:
        """Waits until engines serve every Version of `load_soon`."""
        await self._loaded.wait()

    async def keep_only(self, number: int) -> None:
        """Removes all other Versions that an ended run left: a resume needs no more disk than a run."""
        await asyncio.to_thread(self._store.keep_only, number)

    async def recover(self, number: int) -> None:
        """Has engines load Version `number` of an ended run from its files.

        Without these files the trainer writes its weights; they differ only if steps without a Version followed.
        """
        await self.seal()
        if self._newest is None:
            kept = await asyncio.to_thread(self._store.kept, number)
            if kept is not None and await self._buffer.record_version(number, kept.checksum):
                self._newest, self.number = kept, number
            else:
                await self.write(number, push=False)
                await self.seal()
        assert self._newest is not None
        await self._engine.update_weights(number, self._newest.path)

    async def _write_canary(self, directory: Path) -> None:
        """Writes the logprobs of the new weights on one prompt; engines of other projects are checked by them."""
        task = await asyncio.to_thread(self._prepared.service.draw, Split.EVAL, 0)
        row = self._prepared.renderer.prompt_ids(task.messages)[:CANARY_TOKENS]
        (logprobs,) = await self._trainer.logprobs([row])
        bound = PARITY_BOUND_NATS[self._prepared.config.model.dtype]
        await asyncio.to_thread(canary.write, canary.Canary(tuple(row), logprobs, bound), directory)
