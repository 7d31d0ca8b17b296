"""Engines that sample for the Tinker server: a few processes, each serving one set of weights at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.http_client import HttpEngine
from shoal.engine.launch import engine_child
from shoal.errors import EngineUnavailable

START_TIMEOUT_S = 300.0
PATIENCE_S = 2.0
"""Seconds that a request for other weights waits before an engine takes no more requests for those that it serves."""


@dataclass
class Slot:
    """An engine, the weights that it serves, and the number of requests that it answers now."""

    base: str
    weights: Path
    engine: HttpEngine
    longest: int
    """Tokens of a prompt and its completion at most."""
    users: int = 0
    version: int = 0
    used_at: float = 0.0


class Samplers:
    """Engines by weights. A request for weights that no engine serves waits for an idle engine, which loads them."""

    def __init__(self, bases: Mapping[str, Path], folder: Path, *, most: int, threads: int, dtype: str) -> None:
        """`folder` holds all weights but those of the bases; `most` engines of each base run at once."""
        self._bases, self._folder, self._most = dict(bases), folder, most
        self._threads, self._dtype = threads, dtype
        self._slots: list[Slot] = []
        self._changed = asyncio.Condition()
        self._stack = AsyncExitStack()
        self._waiting: list[float] = []  # when the requests that wait for weights were made

    async def aclose(self) -> None:
        """Ends the engines."""
        await self._stack.aclose()

    @asynccontextmanager
    async def engine(self, base: str, weights: Path | None) -> AsyncIterator[Slot]:
        """An engine that serves a base model with its own weights, or with those in a folder."""
        slot = await self._slot(base, weights or self._bases[base])
        try:
            yield slot
        except EngineUnavailable:
            try:
                await slot.engine.alive()
            except EngineUnavailable:
                self._slots = [other for other in self._slots if other is not slot]  # the next request starts another
            raise
        finally:
            async with self._changed:
                slot.users -= 1
                self._changed.notify_all()

    async def _slot(self, base: str, weights: Path) -> Slot:
        asked = time.monotonic()
        self._waiting.append(asked)
        async with self._changed:
            try:
                while True:
                    slot = await self._ready(base, weights, asked)
                    if slot is not None:
                        slot.users += 1
                        slot.used_at = time.monotonic()
                        return slot
                    await self._changed.wait()
            finally:
                self._waiting.remove(asked)

    async def _ready(self, base: str, weights: Path, asked: float) -> Slot | None:
        """An engine that serves the weights now; None as long as all are busy with other weights."""
        same = [slot for slot in self._slots if slot.base == base]
        serving = next((slot for slot in same if slot.weights == weights), None)
        if serving is not None:
            longest_wait = min(self._waiting)
            impatient = longest_wait < asked and time.monotonic() - longest_wait > PATIENCE_S
            return None if impatient and serving.users else serving
        if len(same) < self._most:
            return await self._start(base, weights)
        idle = min((slot for slot in same if not slot.users), key=lambda slot: slot.used_at, default=None)
        if idle is not None:
            await idle.engine.update_weights(idle.version + 1, weights)
            idle.version, idle.weights = idle.version + 1, weights
        return idle

    async def _start(self, base: str, weights: Path) -> Slot:
        child = engine_child(
            self._bases[base],
            EngineConfig(),
            ModelConfig(path=str(self._bases[base]), dtype=self._dtype),
            max_model_len=None,
            threads=self._threads,
            log=self._folder / "engine.log",
            weights=self._folder,
        )
        running = await self._stack.enter_async_context(child)
        engine = await running.serving(START_TIMEOUT_S)
        self._stack.push_async_callback(engine.aclose)
        slot = Slot(base, self._bases[base], engine, (await engine.info()).max_model_len)
        if weights != slot.weights:
            await engine.update_weights(1, weights)
            slot.weights, slot.version = weights, 1
        self._slots.append(slot)
        return slot
