"""Models that a pool serves by name instead of its newest Version: adapters on its weights, and whole models.

Adapters share the replicas and their batches. A replica serves one whole model at a time; a request for another one
loads it into a replica without requests. After `TURN_S` of waiting for such a replica, later requests wait as well,
until a replica has answered its present ones.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from shoal.files import ADAPTER_FILE, MODEL_FILE

TURN_S = 2.0


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
