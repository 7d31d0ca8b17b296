"""Models made on this machine: directories in the user's cache that appear whole or not at all."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.errors import ModelError
from shoal.files import cache_directory
from shoal.net.process import torch_environment

REFUSAL = "refusal.txt"
"""File in the directory with the reason why making the model failed."""
UNFINISHED = "unfinished-"


def make(name: str, module: str, arguments: Sequence[str]) -> tuple[Path, float]:
    """Directory of the model `name`, and the seconds spent making it: 0 when the cache has it.

    The command `python -m MODULE DIRECTORY ARGUMENTS` makes a missing model. Raises `ModelError`.
    """
    directory = cache_directory() / name
    if (directory / "config.json").is_file():
        return directory, 0.0
    began_s = time.monotonic()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished, lock = _unfinished(directory.parent)
    except OSError as error:
        raise ModelError(
            f"the cache {directory.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME"
        ) from None
    try:
        command = [sys.executable, "-m", module, str(unfinished), *arguments]
        done = subprocess.run(command, env=torch_environment(1), check=False)
        if done.returncode != 0:
            refusal = unfinished / REFUSAL
            if refusal.is_file():
                raise ModelError(refusal.read_text(encoding="utf-8"))
            hint = "; is there enough memory?" if done.returncode < 0 else ""
            raise ModelError(f"the model {name} could not be made: its process ended with code {done.returncode}{hint}")
        try:
            unfinished.rename(directory)
        except OSError as error:
            if not (directory / "config.json").is_file():  # otherwise another process was sooner: its model is used
                raise ModelError(f"{directory} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return directory, time.monotonic() - began_s


def _unfinished(folder: Path) -> tuple[Path, int | None]:
    """A new folder for a making, and its lock, which lasts as long as this process; removes those without a lock.

    Some file systems, such as NFS, cannot lock a folder: then the lock is None, and none is removed. Raises `OSError`.
    """
    for left in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # raised while a model is being made, and where that is unknown
            lock = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:  # another process may take a folder for one that was left, until it is locked
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
        try:
            lock = _locked(made)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:
            return made, None
        if made.is_dir():
            return made, lock
        os.close(lock)


def _locked(folder: Path) -> int:
    """Descriptor that locks a folder. Raises `OSError`, which is a `BlockingIOError` where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
