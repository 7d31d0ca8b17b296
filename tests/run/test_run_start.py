"""How runs start: what one that fails leaves behind, and what one that is resumed serves."""

import asyncio
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config import Config, load, parse
from shoal.errors import ConfigError, RunDirError
from shoal.experience.buffer import Buffer
from shoal.observe.metrics import Record
from shoal.run.loop import TrainLoop
from shoal.run.plan import prepare
from shoal.run.result import RunTotals
from shoal.run.run_dir import changed_settings, run_meta, write_resolved
from shoal.run.training import run_training, train
from shoal.weights.store import WeightStore


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


class LaterWeights:
    """A trainer whose weights have gone on since the last push."""

    async def write_version(self, path: Path, *, push: bool) -> float:
        path.write_bytes(b"of a step without a push")  # noqa: ASYNC240
        return 0.0


class Serving:
    """An engine that remembers what it was given to serve."""

    served: tuple[int, bytes] | None = None

    async def update_weights(self, version: int, path: Path) -> None:
        self.served = version, path.read_bytes()  # noqa: ASYNC240


def test_a_resumed_run_serves_the_weights_that_were_published_and_not_those_of_steps_after_the_push(
    tmp_path: Path,
) -> None:
    config = parse({"run_dir": str(tmp_path), "tasks": [{"name": "gcd"}], "train": {"push_every": 2}})
    store, engine = WeightStore(tmp_path / "weights"), Serving()
    (store.begin(1) / "model.safetensors").write_bytes(b"of the push")
    sealed = store.seal(1)

    async def resume() -> None:
        buffer = Buffer.open(tmp_path, run_meta(config), max_running=1)
        await buffer.record_version(1, sealed.checksum)
        parts: Any = SimpleNamespace(
            config=config, engine=engine, trainer=LaterWeights(), buffer=buffer, store=store, swarm=None
        )
        await TrainLoop(parts, first_step=3, version=1).load_recovered(1)
        await buffer.close()

    asyncio.run(resume())
    assert engine.served == (1, b"of the push")


def test_what_a_resumed_run_comes_to_counts_the_steps_before_it() -> None:
    records: list[Record] = [
        {"kind": "eval", "step": 0, "sampled": 0.1, "greedy": None},
        {"kind": "step", "step": 1, "reward": 0.2, "staleness_max": 1},
        {"kind": "step", "step": 2, "reward": 0.3, "staleness_max": 3},
        {"kind": "event", "name": "resumed"},
        {"kind": "step", "step": 3, "reward": 0.9, "staleness_max": 7},
    ]
    totals = RunTotals.earlier(records, 2)
    assert (totals.rewards, totals.staleness_max) == ([0.2, 0.3], 3)
    assert totals.evals[0]["sampled"] == 0.1


def test_settings_that_a_resumed_run_was_not_started_with_are_named(tmp_path: Path) -> None:
    tasks: dict[str, Any] = {"tasks": [{"name": "gcd"}]}
    write_resolved(parse(tasks), tmp_path)
    assert changed_settings(parse(tasks), tmp_path) == []
    assert changed_settings(parse(tasks, ["train.lr=1", "seed=7"]), tmp_path) == ["train.lr", "seed"]


def test_credentials_of_urls_are_in_a_file_of_its_owner_alone_and_a_resume_has_them(tmp_path: Path) -> None:
    urls: dict[str, Any] = {"swarm": {"servers": ["nats://secret@reef:4222"]}, "reward": {"urls": ["http://a:b@c:1"]}}
    config = parse({"tasks": [{"name": "gcd"}], **urls})
    write_resolved(config, tmp_path)
    resolved = tmp_path / "resolved.toml"
    assert "nats://***@reef:4222" in resolved.read_text()
    assert not [word for word in ("secret", "a:b") if word in resolved.read_text()]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "resolved.toml": 0o600,
        "credentials.json": 0o600,
    }
    assert load(resolved).swarm.servers == config.swarm.servers
    assert changed_settings(config, tmp_path) == []
    assert load(resolved, ["swarm.servers=[]"]).swarm.servers == []
    (tmp_path / "credentials.json").unlink()
    with pytest.raises(ConfigError, match=r"reward\.urls\.0: expected credentials in place of \*\*\*"):
        run_training(load(resolved))


def test_what_a_run_is_started_with_is_written_down_whole_or_not_at_all(tmp_path: Path) -> None:
    config = parse({"tasks": [{"name": "gcd"}]})
    write_resolved(config, tmp_path)
    before = (tmp_path / "resolved.toml").read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(RunDirError, match="cannot be written"):
            write_resolved(parse({"tasks": [{"name": "gcd"}], "seed": 7}), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "resolved.toml").read_text() == before
