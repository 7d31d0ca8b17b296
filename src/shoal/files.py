"""Durable and atomic writes of files, and checksums."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL_FILE, ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"
"""Files with the tensors of a model, and of a low-rank adapter in the form of peft."""


def checksum(path: Path) -> str:
    """BLAKE2b-128 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive the loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
