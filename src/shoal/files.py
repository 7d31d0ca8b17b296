"""Durable and atomic writes of files, and checksums."""

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

MODEL_FILE, ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"
"""Files with the tensors of a model, and of a low-rank adapter in the form of peft."""

HEAD_BYTES = 8
"""Bytes of the number with which a safetensors file begins: the length of its header."""
PART_BYTES = 4 << 20
"""Bytes of a file that are hashed together; parts are hashed in parallel."""
HASHED_AT_ONCE = 16
OF_PARTS = "parts-"
"""Beginning of a checksum that was made of the digests of parts."""


def cache_directory() -> Path:
    """Folder of what is made for this user on this machine: `$XDG_CACHE_HOME/shoal`, else `~/.cache/shoal`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def digest_of(data: bytes) -> str:
    """BLAKE2b-256 of some bytes, in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def part_digests(path: Path) -> tuple[str, ...]:
    """`digest_of` each `PART_BYTES` of a file, in order; threads share the work. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        offsets = range(0, size, PART_BYTES)

        def digest(offset: int) -> str:
            return digest_of(_read_at(descriptor, offset, min(PART_BYTES, size - offset)))

        if len(offsets) < 2:
            return tuple(map(digest, offsets))
        with ThreadPoolExecutor(min(HASHED_AT_ONCE, len(offsets), os.cpu_count() or 1), "hashing") as threads:
            return tuple(threads.map(digest, offsets))


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Bytes of an open file, fewer at its end: the kernel reads at most 2 GB at once, and may read less."""
    parts = []
    while size and (part := os.pread(descriptor, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def checksum(path: Path, digests: tuple[str, ...] | None = None) -> str:
    """Checksum of a file's bytes: BLAKE2b-128 of them, or of the digests of its parts if it has several.

    `digests` are those of `part_digests`, if they are known.
    """
    digests = part_digests(path) if digests is None else digests
    if len(digests) < 2:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return OF_PARTS + hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def has_checksum(path: Path, expected: str) -> bool:
    """Whether a file has a checksum. Raises `OSError`."""
    return checksum(path) == expected


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive the loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable(database: sqlite3.Connection) -> None:
    """Makes each later commit survive the loss of power before it returns."""
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")


def siblings(path: Path) -> list[str]:
    """Sorted names in the folder of a path; empty if the folder cannot be read.

    >>> siblings(Path("/no/such/folder/file.toml"))
    []
    """
    try:
        return sorted(one.name for one in path.absolute().parent.iterdir())
    except OSError:
        return []


@contextmanager
def replaced(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yields the temporary name of a new file, which at the end atomically and durably replaces `path`.

    Only the owner can read a `private` file. After an error `path` is unchanged. Raises `OSError`.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        if private:
            unfinished.unlink(missing_ok=True)  # the file of a killed process may be readable by all
            os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
