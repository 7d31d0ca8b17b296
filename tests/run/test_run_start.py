"""How runs start: what one that fails leaves behind, and what one that is resumed serves."""

import asyncio
import json
import random
import resource
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config import Config, load, parse
from shoal.errors import ConfigError, RunDirError, SandboxUnavailable, TaskError
from shoal.experience.buffer import Buffer
from shoal.model.file_sizes import shapes_of
from shoal.net.listening import listening_socket, url_of
from shoal.observe.metrics import Record
from shoal.run.commands.plan import check_urls, plan
from shoal.run.machine.memory import check_fits, trainer_mesh
from shoal.run.policy import ServedVersions
from shoal.run.prepare import check_scores, prepare
from shoal.run.result import RunTotals
from shoal.run.run_dir import changed_settings, run_meta, write_resolved
from shoal.run.training import run_training, train
from shoal.tasks.sdk import Definition, Question
from shoal.types import Split, Task
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
            asyncio.run(train(prepared))  # as one that began in the same moment
        assert (tmp_path / "run" / "log.sqlite").is_file()
        assert (tmp_path / "run" / "resolved.toml").read_text() == "of the run that goes on"


def test_what_a_data_set_leaves_out_is_an_event_of_the_run(tmp_path: Path) -> None:
    tree: Any = {"tasks": [{"name": "gcd"}], "checkpoint": {"backup": "nosuch://host/run"}}
    settings = parse({**tree, "run_dir": str(tmp_path / "run")})
    prepared: Any = SimpleNamespace(config=settings, service=SimpleNamespace(notes=["1 of 2 rows is left out"]))
    seen: list[Record] = []
    with pytest.raises(RunDirError, match="nosuch"):  # before anything is started
        asyncio.run(train(prepared, listeners=[seen.append]))
    events = [(one["name"], one["reason"]) for one in seen if one["kind"] == "event"]
    assert events == [("left_out", "1 of 2 rows is left out")]


class LaterWeights:
    """A trainer whose weights have gone on since the last push."""

    async def write_version(self, path: Path, *, push: bool, later: bool) -> float:
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
        parts: Any = {"engine": engine, "trainer": LaterWeights(), "buffer": buffer, "store": store}
        nothing: Any = None
        await ServedVersions(nothing, **parts, number=1).recover(1)
        await buffer.close()

    asyncio.run(resume())
    assert engine.served == (1, b"of the push")


def planned(folder: Path, model: Path, *settings: str, resume: bool = False) -> dict[str, object]:
    """The plan of a run on tasks of a file, one of which is a program."""
    row = {"prompt": "f", "answer": "x", "info": {"tests": [{"call": "f", "args": [], "returns": 1}]}}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps({**row, 'prompt': f'f{i}'})}\n" for i in range(40)))
    task: Any = {"name": "programs", "service": "jsonl", "path": str(folder / "rows.jsonl"), "scorer": "code"}
    tree: Any = {"run_dir": str(folder / "run"), "model": {"path": str(model)}, "tasks": [task]}
    return plan(parse(tree, settings), resume=resume)


def test_a_resume_can_be_tried_dry_where_a_new_run_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.sqlite").touch()
    assert planned(tmp_path, tiny_model_dir, resume=True)["run_dir"] == str(tmp_path / "run")
    with pytest.raises(RunDirError, match="exists already"):
        planned(tmp_path, tiny_model_dir)


def test_a_plan_counts_what_the_trainer_keeps_for_adapters_in_place_of_all_weights(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Weight, gradient and moments take 16 bytes of each trained number; others 4."""
    whole, adapted = (planned(tmp_path, tiny_model_dir, f"train.lora.rank={rank}") for rank in (0, 1000))
    numbers = 1000 * 2 * (32 + 32 + 2 * (32 + 16) + 32 + 32 + 3 * (32 + 64))  # of the 7 matrices of each of 2 layers
    parameters = int(str(whole["parameters"]))
    assert whole["trainer_memory_mb"] == pytest.approx(16 * parameters / 1e6, abs=0.11)
    assert adapted["trainer_memory_mb"] == pytest.approx((16 * numbers + 4 * parameters) / 1e6, abs=0.11)


def test_a_plan_of_stages_has_the_largest_trainer_and_reads_their_files(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = tmp_path / "talks.jsonl"
    stages = f'stages=[{{kind="rl"}}, {{kind="sft", data="{rows}", train={{lora={{rank=0}}}}}}]'
    with pytest.raises(TaskError, match=r"talks\.jsonl: JSONL file not found"):
        planned(tmp_path, tiny_model_dir, "train.lora.rank=8", stages)
    rows.write_text("{}\n")
    found = planned(tmp_path, tiny_model_dir, "train.lora.rank=8", stages)
    assert found["trainer_memory_mb"] == planned(tmp_path, tiny_model_dir)["trainer_memory_mb"]


def test_a_model_whose_training_exceeds_the_machine_s_memory_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = parse({"run_dir": str(tmp_path / "run"), "tasks": [{"name": "gcd"}]})
    needed = int(trainer_mesh(config, shapes_of(tiny_model_dir), 0).state_bytes)
    check_fits(config, tiny_model_dir, needed)
    with pytest.raises(
        ConfigError, match=r"model\.path: expected a model whose training fits .* Set train\.lora\.rank"
    ):
        check_fits(config, tiny_model_dir, needed - 1)


class Marks:
    """A task whose answers are their own marks, and of which only the first question can be scored."""

    def __init__(self, truth: str) -> None:
        self.truth = truth

    def draw(self, split: Split, index: int) -> Task:
        return Task(f"{split} {index}", "", (), self.truth)

    def score(self, asked: Task, answer: str) -> float:
        assert asked.id == f"{Split.TRAIN} 0"
        return float(answer)


def test_a_task_s_own_score_is_tried_on_the_truth_of_its_first_question() -> None:
    asyncio.run(check_scores([Definition("marks", Marks("1"))], 4))
    with pytest.raises(ConfigError, match=r"tasks.marks: expected a score of one row, got"):
        asyncio.run(check_scores([Definition("marks", Marks("x"))], 4))


def test_programs_are_refused_where_no_sandbox_works(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.sandbox.runner._TRIALS", {})
    monkeypatch.setattr(sys, "platform", "another")
    with pytest.raises(SandboxUnavailable, match=r"no sandbox for untrusted programs works.*needs Linux"):
        planned(tmp_path, tiny_model_dir)


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
    urls: dict[str, Any] = {"swarm": {"servers": ["nats://secret@reef:4222"]}, "engine": {"urls": ["http://a:b@c:1"]}}
    config = parse({"tasks": [{"name": "gcd"}], **urls})
    left = tmp_path / "credentials.json.unfinished"
    left.touch(0o644)  # by a process that was killed
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
    with pytest.raises(ConfigError, match=r"engine\.urls\.0: expected credentials in place of \*\*\*"):
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


def test_a_dry_run_tries_every_server_and_refuses_a_run_without_one_that_it_needs() -> None:
    with listening_socket("127.0.0.1", 0) as open_port, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody else listens there
        there, away = url_of(open_port), url_of(deaf)
        judging = {"name": "judge", "url": away, "model": "m", "rubric": "10 for all", "best": 10}
        tasks = [Definition("asked", Asked(judging))]

        def reached(services: list[Definition], **settings: object) -> dict[str, str]:
            return asyncio.run(check_urls(parse({"tasks": [{"name": "gcd"}], **settings}), services))

        swarm = away.replace("http://", "nats://user:secret@")
        found = reached([], engine={"urls": [there, away]}, swarm={"servers": [swarm]})
        assert found == {away: "Connection refused", swarm.replace("user:secret", "***"): "Connection refused"}
        with pytest.raises(ConfigError, match=rf"engine\.urls: expected a server .* at {away}, got: Connection"):
            reached([], engine={"urls": [away]})
        with pytest.raises(ConfigError, match=rf"scorer\.url: expected a server that can be reached at {away}"):
            reached(tasks)


class Asked:
    """A task with one question, which a judging model scores."""

    def __init__(self, scorer: dict[str, object]) -> None:
        self.scorer = scorer

    def draw(self, rng: random.Random) -> Question:
        return Question(f"question {rng.random()}", scorer=self.scorer)
