"""What a start that fails leaves behind."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.buffer import Buffer
from shoal.config import Config, parse
from shoal.errors import RunDirError
from shoal.run.plan import prepare
from shoal.run.training import run_meta, run_training, train


@contextmanager
def begun(config: Config) -> Iterator[None]:
    """Another process's run in the same directory, before its first group."""
    buffer = Buffer.open(Path(config.run_dir), run_meta(config), max_running=1)
    (Path(config.run_dir) / "resolved.toml").write_text("of the run that goes on")
    try:
        yield
    finally:
        asyncio.run(buffer.close())


def test_a_start_in_the_directory_of_a_run_that_goes_on_leaves_it_alone(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = {"name": "gcd"}
    config = parse({"run_dir": str(tmp_path / "run"), "tasks": [task], "model": {"path": str(tiny_model_dir)}})
    with begun(config):
        with pytest.raises(RunDirError, match="does another process write this run"):
            run_training(config, resume=True)
        with prepare(config) as prepared, pytest.raises(RunDirError):
            asyncio.run(train(config, prepared))  # as one that began in the same moment
        assert (tmp_path / "run" / "log.sqlite").is_file()
        assert (tmp_path / "run" / "resolved.toml").read_text() == "of the run that goes on"
