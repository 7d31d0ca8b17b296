"""Models that are made on this machine: directories in the user's cache that appear whole or not at all."""

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
    """Where models made here are kept: `$XDG_CACHE_HOME/shoal`, else `~/.cache/shoal`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def made(name: str, module: str, arguments: Sequence[str]) -> tuple[Path, float]:
    """The model of that name and the seconds that making it took: 0 when it was there.

    Another one is made by `python -m MODULE DIRECTORY ARGUMENTS`. Raises `ModelError`.
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
        _rename(unfinished, directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory, time.monotonic() - began_s


def _rename(unfinished: Path, directory: Path) -> None:
    """Gives a model its name, unless another process was sooner: then that one's is used."""
    try:
        unfinished.rename(directory)
    except OSError as error:
        if not (directory / "config.json").is_file():
            raise ModelError(f"{directory} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
        shutil.rmtree(unfinished, ignore_errors=True)
