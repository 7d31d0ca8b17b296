"""Models made on this machine: directories in the user's cache that appear whole or not at all."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ModelError
from shoal.net.process import torch_environment


def cache_directory() -> Path:
    """Folder of models made here: `$XDG_CACHE_HOME/shoal`, else `~/.cache/shoal`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


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
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=directory.parent))
    except OSError as error:
        raise ModelError(
            f"the cache {directory.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME"
        ) from None
    try:
        command = [sys.executable, "-m", module, str(unfinished), *arguments]
        done = subprocess.run(command, env=torch_environment(1), check=False)
        if done.returncode != 0:
            raise ModelError(f"the model {name} could not be made: its process ended with code {done.returncode}")
        try:
            unfinished.rename(directory)
        except OSError as error:
            if not (directory / "config.json").is_file():  # otherwise another process was sooner: its model is used
                raise ModelError(f"{directory} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory, time.monotonic() - began_s
