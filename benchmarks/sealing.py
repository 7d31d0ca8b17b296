"""Seconds that a step waits for a Version of 16 GB, and seconds of its hash beside the next step.

bytes               size of the Version's file, which is sparse: writing it is the trainer's, and is not measured
publish_wait_s      seconds that the loop waits from the trainer's last byte until the next step may begin
seal_s              seconds until engines may load the Version: its parts are hashed by all cores
one_thread_per_s    bytes that one thread hashes per second, as it did within the step before
"""

import asyncio
import hashlib
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import Report, say
from shoal.config import parse
from shoal.files import MODEL_FILE
from shoal.run.policy import ServedVersions
from shoal.weights.store import WeightStore

BYTES, QUICK_BYTES = 16 << 30, 64 << 20
ONE_THREAD_BYTES = 256 << 20


class SparseTrainer:
    """A trainer whose Versions are sparse files."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def write_version(self, path: Path, **_: object) -> float:
        """Writes no byte, and the size."""
        with path.open("wb") as file:
            file.truncate(self._size)
        return 0.0


class KeptRecords:
    """The Versions that the log would have."""

    def __init__(self) -> None:
        self.checksums: dict[int, str] = {}

    async def record_version(self, version: int, checksum: str) -> bool:
        """Keeps a record."""
        self.checksums[version] = checksum
        return True


async def waits(folder: Path, size: int) -> dict[str, float]:
    """Seconds of a Version of a size."""
    prepared: Any = SimpleNamespace(version_file=MODEL_FILE, config=parse({"tasks": [{"name": "gcd"}]}))
    engine: Any = None
    trainer: Any = SparseTrainer(size)
    records: Any = KeptRecords()
    versions = ServedVersions(prepared, engine, trainer, records, WeightStore(folder))
    began_s = time.monotonic()
    await versions.write(1)
    waited_s = time.monotonic()
    await versions.seal()
    sealed_s = time.monotonic()
    assert [*records.checksums] == [1], "a Version is in the log once it is sealed"
    return {"publish_wait_s": waited_s - began_s, "seal_s": sealed_s - waited_s}


def measure(quick: bool) -> Report:
    """The report."""
    size = QUICK_BYTES if quick else BYTES
    with tempfile.TemporaryDirectory(dir=".") as made:
        folder = Path(made)
        say(f"Versions of {size / 1e9:.1f} GB")
        report: Report = {"bytes": size, **asyncio.run(waits(folder / "weights", size))}
        data = bytes(min(size, ONE_THREAD_BYTES))
        began_s = time.monotonic()
        hashlib.blake2b(data, digest_size=16).digest()
        return {**report, "one_thread_per_s": len(data) / (time.monotonic() - began_s)}
