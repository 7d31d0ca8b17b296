"""Engines that sample for the Tinker server, each serving a base model with all adapters on it.

Some are processes of this host; others join from other hosts, and leave. Weights of another form than an adapter take
an engine for themselves while they are asked for.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.http_client import HttpEngine
from shoal.engine.launch import engine_child
from shoal.engine.protocol import ScoreResponse
from shoal.errors import EngineUnavailable
from shoal.types import Completion, Sampling
from shoal.weights.store import ADAPTER_FILE, FILE

START_TIMEOUT_S = 300.0
PATIENCE_S = 2.0
"""Seconds that a request for other weights waits before an engine takes no more requests for its present ones."""
MOST_ADAPTERS = 48
"""Unused adapters that an engine keeps; the least recently used is removed first."""


class NumberedWeights:
    """Numbers by which engines load weights. An engine that joined pulls them from this server by number.

    Invariant: numbers increase, also across restarts of the server, since they count from the microsecond of its start.
    """

    def __init__(self) -> None:
        self._next = count(time.time_ns() // 1000)
        self._folders: dict[int, Path] = {}

    @contextmanager
    def number(self, folder: Path) -> Iterator[int]:
        """A new number of the weights in a folder, for as long as the block lasts."""
        number = next(self._next)
        self._folders[number] = folder
        try:
            yield number
        finally:
            del self._folders[number]

    def directory_of(self, version: int) -> Path:
        """Implements `weights.serving.Versions`."""
        folder = self._folders.get(version)
        if folder is None:
            raise FileNotFoundError(f"no engine loads weights {version} now")
        return folder


@dataclass(eq=False)
class Slot:
    """An engine, the weights that it serves, and the number of requests that it answers now."""

    base: str
    weights: str
    """Name of the weights; the base model's own may be asked for with any adapter."""
    engine: HttpEngine
    longest: int
    """Tokens of a prompt and its completion at most."""
    users: int = 0
    joined: str = ""
    """Name of an engine that joined; empty for a process of this host."""
    used_at: float = 0.0
    adapters: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Loaded adapters with the number of requests that each answers now; last used last."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class ServedWeights:
    """Weights that an engine serves now."""

    engine: HttpEngine
    adapter: str
    longest: int
    """Tokens of a prompt and its completion at most."""

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, n: int) -> list[Completion]:
        """Samples `n` completions of one prompt."""
        return await self.engine.generate(prompt, sampling, n=n, adapter=self.adapter or None)

    async def scored(self, token_ids: Sequence[int], others: int | list[list[int]]) -> ScoreResponse:
        """Logprobs of tokens, and of others in their places."""
        return await self.engine.scored(token_ids, others, adapter=self.adapter or None)


class Samplers:
    """Engines by weights. A request for weights that no engine serves waits for an idle engine, which loads them."""

    def __init__(
        self,
        bases: Mapping[str, Path],
        folder: Path,
        numbered: NumberedWeights,
        *,
        most: int,
        threads: int,
        dtype: str,
    ) -> None:
        """`folder` holds all weights but those of the bases; `most` processes of each base run at once here."""
        self._bases, self._folder, self._numbered, self._most = dict(bases), folder, numbered, most
        self._threads, self._dtype = threads, dtype
        self._slots: list[Slot] = []
        self._changed = asyncio.Condition()
        self._stack = AsyncExitStack()
        self._waiting: list[float] = []  # when the requests that wait for weights were made

    async def aclose(self) -> None:
        """Ends the engines."""
        await self._stack.aclose()

    async def join(self, name: str, base: str, engine: HttpEngine) -> None:
        """Adds an engine that joined, with any weights. Raises `EngineError`."""
        try:
            info = await engine.info()
        except BaseException:
            await engine.aclose()
            raise
        weights = "" if info.version else await asyncio.to_thread(_name, self._bases[base], FILE)
        async with self._changed:
            self._slots.append(Slot(base, weights, engine, info.max_model_len, joined=name))
            self._changed.notify_all()

    async def leave(self, name: str) -> None:
        """Removes an engine that joined; its requests go to other engines."""
        for slot in [slot for slot in self._slots if slot.joined == name]:
            self._slots.remove(slot)
            await slot.engine.aclose()

    @asynccontextmanager
    async def engine(self, base: str, weights: Path | None) -> AsyncIterator[ServedWeights]:
        """An engine that serves a base model with its own weights, or with the weights or adapter in a folder."""
        adapter = weights is not None and await asyncio.to_thread((weights / ADAPTER_FILE).is_file)
        slot = await self._slot(base, self._bases[base] if adapter or weights is None else weights)
        name = ""
        try:
            if adapter and weights is not None:
                name = await self._adapted(slot, weights)
            yield ServedWeights(slot.engine, name, slot.longest)
        except EngineUnavailable:
            await self._check(slot)
            raise
        finally:
            async with self._changed:
                slot.users -= 1
                if name:
                    slot.adapters[name] -= 1
                self._changed.notify_all()

    async def _check(self, slot: Slot) -> None:
        """Forgets an engine that does not answer; the next request starts another, or waits for one that joins."""
        try:
            await slot.engine.alive()
        except EngineUnavailable:
            self._slots = [other for other in self._slots if other is not slot]

    async def _adapted(self, slot: Slot, folder: Path) -> str:
        """Name under which the engine serves an adapter; counts one use of it."""
        name = await asyncio.to_thread(_name, folder, ADAPTER_FILE)
        async with slot.loading:
            if name not in slot.adapters:
                if len(slot.adapters) >= MOST_ADAPTERS:
                    idle = await self._idle_adapter(slot)
                    del slot.adapters[idle]
                    await slot.engine.unload_adapter(idle)
                with self._numbered.number(folder) as number:
                    loaded = await slot.engine.load_adapter(name, number, folder)
                for unknown in loaded.keys() - slot.adapters.keys() - {name}:  # of a server that ran here before
                    await slot.engine.unload_adapter(unknown)
                slot.adapters[name] = 0
            slot.adapters[name] += 1
            slot.adapters.move_to_end(name)
        return name

    async def _idle_adapter(self, slot: Slot) -> str:
        """The adapter that was used longest ago, once one is not in use."""
        async with self._changed:
            while True:
                for name, users in slot.adapters.items():
                    if not users:
                        return name
                await self._changed.wait()

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
        name = await asyncio.to_thread(_name, weights, FILE)
        serving = min((slot for slot in same if slot.weights == name), key=lambda slot: slot.users, default=None)
        if serving is not None:
            longest_wait = min(self._waiting)
            impatient = longest_wait < asked and time.monotonic() - longest_wait > PATIENCE_S
            return None if impatient and serving.users else serving
        if sum(not slot.joined for slot in same) < self._most:
            return await self._start(base, weights)
        idle = min((slot for slot in same if not slot.users), key=lambda slot: slot.used_at, default=None)
        if idle is not None:
            idle.weights = ""  # until it has the others
            try:
                await self._load(idle.engine, weights)
            except EngineUnavailable:
                await self._check(idle)
                raise
            idle.weights = name
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
        name = await asyncio.to_thread(_name, weights, FILE)
        slot = Slot(base, name, engine, (await engine.info()).max_model_len)
        if weights != self._bases[base]:
            await self._load(engine, weights)
        self._slots.append(slot)
        return slot

    async def _load(self, engine: HttpEngine, weights: Path) -> None:
        with self._numbered.number(weights) as number:
            await engine.update_weights(number, weights)


def _name(folder: Path, file: str) -> str:
    """Name of the weights in a folder; the folder may be overwritten later."""
    written = (folder / file).stat().st_mtime_ns if (folder / file).exists() else 0
    return f"{folder}@{written}"
