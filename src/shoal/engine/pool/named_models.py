"""Models that a pool serves by name instead of its newest Version: adapters on its weights, and whole models.

Adapters share the replicas and their batches. A replica serves one whole model at a time; a request for another one
loads it into a replica without requests. After `TURN_S` of waiting for such a replica, later requests wait as well,
until a replica has answered its present ones.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.files import ADAPTER_FILE, MODEL_FILE

if TYPE_CHECKING:
    from shoal.engine.pool.replica import PoolEngine

TURN_S = 2.0
MOST_ADAPTERS = 48
"""Adapters that a replica keeps loaded; the least recently used one goes first."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model by the folder of its files. A name is of these files: other files at the same path have another one."""

    folder: Path | None = None
    """None: the pool's own weights, without an adapter."""
    whole: str = ""
    """Name of the whole model; empty for the pool's own weights."""
    adapter: str = ""
    """Name of the adapter; empty without one."""

    @classmethod
    def at(cls, folder: Path | None) -> "NamedModel":
        """The model of an adapter or of all weights in a folder. Reads the disk."""
        if folder is None:
            return cls()
        is_adapter = (folder / ADAPTER_FILE).is_file()
        file = folder / (ADAPTER_FILE if is_adapter else MODEL_FILE)
        name = f"{folder}@{file.stat().st_mtime_ns if file.exists() else 0}"
        return cls(folder, adapter=name) if is_adapter else cls(folder, whole=name)


class NumberedWeights:
    """Version numbers under which engines load named models. An engine of another host pulls them by number.

    Invariant: numbers increase, also across restarts, since they count from the microsecond of the start.
    """

    def __init__(self) -> None:
        self._next = count(time.time_ns() // 1000)
        self._folders: dict[int, Path] = {}

    @contextmanager
    def number(self, folder: Path) -> Iterator[int]:
        """A new number of the weights in a folder, valid inside the block."""
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


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """Adapter of a replica."""

    name: str
    version: int
    users: int = 0
    """Requests that it answers now."""


class ReplicaAdapters:
    """Adapters that a pool has loaded into one engine since its start.

    Invariant: an adapter stays loaded while a request uses it.
    """

    def __init__(self, engine: "PoolEngine", numbers: NumberedWeights) -> None:
        self._engine, self._numbers = engine, numbers
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # last used last
        self._loading = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def used(self, model: NamedModel) -> AsyncIterator[LoadedAdapter]:
        """The adapter of a model, loaded inside the block. Raises `EngineError`."""
        async with self._loading:
            loaded = self._loaded.get(model.adapter) or await self._load(model)
            self._loaded.move_to_end(loaded.name)
            loaded.users += 1
        try:
            yield loaded
        finally:
            loaded.users -= 1
            self._freed.set()

    async def _load(self, model: NamedModel) -> LoadedAdapter:
        assert model.folder is not None
        while len(self._loaded) >= MOST_ADAPTERS:
            unused = next((name for name, one in self._loaded.items() if not one.users), None)
            if unused is None:
                self._freed.clear()
                await self._freed.wait()
            else:
                del self._loaded[unused]
                await self._engine.unload_adapter(unused)
        with self._numbers.number(model.folder) as number:
            versions = await self._engine.load_adapter(model.adapter, number, model.folder)
        for unknown in versions.keys() - self._loaded.keys() - {model.adapter}:  # of an earlier pool
            await self._engine.unload_adapter(unknown)
        loaded = self._loaded[model.adapter] = LoadedAdapter(model.adapter, number)
        return loaded
