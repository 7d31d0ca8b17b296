"""Runs are listed and named, and their models talked with."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import shoal
from shoal.cli import main
from shoal.cli.runs import run_at, run_names
from shoal.config import parse, to_toml
from shoal.experience.log import FILE
from shoal.observe.metrics import JsonlTracker
from shoal.observe.status import listed_runs
from shoal.run.commands.chat import Prompt
from until import until


def make_run(run_dir: Path, steps: int, *, ended: bool) -> Path:
    """A run directory as a run of so many steps leaves it."""
    run_dir.mkdir(parents=True)
    config = parse({"run_dir": str(run_dir), "tasks": [{"name": "chain_sum"}], "train": {"steps": 9}})
    (run_dir / "resolved.toml").write_text(to_toml(config))
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    for step in range(steps + 1):
        if step:
            tracker.log(step, {"reward": 0.5})
        tracker.write("eval", {"step": step, "sampled_reward": step / 10})
    tracker.close()
    if ended:
        (run_dir / "model").mkdir()
    return run_dir


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_listed_with_their_state_and_what_they_came_to(here: Path, capsys) -> None:
    first, second = make_run(here / "runs" / "first", 9, ended=True), make_run(here / "runs" / "second", 3, ended=False)
    os.utime(first / "metrics.jsonl", (1, 1))
    os.utime(first / "resolved.toml", (1, 1))
    one, other = listed_runs(here / "runs")
    assert (one["name"], one["state"], one["steps"], one["of"], one["reward"]) == ("first", "ended", 9, 9, 0.5)
    assert (one["eval_reward_before"], one["eval_reward_after"]) == (0.0, 0.9)
    assert (other["name"], other["state"], other["steps"]) == ("second", "stopped", 3)
    with pytest.raises(SystemExit):
        main(["runs"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:8] == ["first", "ended", "9", "of", "9", "0.5", "0", "->"]
    with pytest.raises(SystemExit):
        main(["runs", "--json"])
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["first", "second"]
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    holding = [sys.executable, "-c", f"{script}; input()", str(second / "log.lock")]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        states = [run["state"] for run in listed_runs(here / "runs")]
        writer.communicate(b"\n")
    assert states == ["ended", "running"]


def test_a_folder_without_runs_is_no_error(here: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["runs"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "runs holds no run; shoal demo makes one\n"


def test_a_run_is_named_by_its_path_or_its_name_and_a_path_comes_first(here: Path) -> None:
    run = make_run(here / "runs" / "mine", 1, ended=True)
    assert run_at("mine") == Path("runs/mine")
    assert run_at("runs/mine") == Path("runs/mine")
    assert run_at(str(run)) == run
    (here / "mine").mkdir()
    assert run_at("mine") == Path("mine")
    assert run_names("mi") == ["mine"]
    assert run_names("x") == []


def test_commands_take_a_run_s_name(here: Path, capsys) -> None:
    make_run(here / "runs" / "mine", 2, ended=True)
    with pytest.raises(SystemExit):
        main(["report", "mine"])
    assert capsys.readouterr().out.splitlines() == ["runs/mine/report.png", "runs/mine/report.html"]


def test_a_run_is_resumed_by_its_name_with_the_settings_it_was_started_with(here: Path, capsys) -> None:
    run = make_run(here / "runs" / "mine", 2, ended=False)
    with pytest.raises(SystemExit):
        main(["train", "--resume", "mine", "--dry-run"])
    assert f"{Path('runs/mine') / FILE} does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "mine", "--dry-run"])
    assert "config file mine does not exist" in capsys.readouterr().err
    (run / FILE).touch()
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", "mine", "--dry-run", "--model.path=demo", "--json"])
    assert ended.value.code == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (plan["steps"], plan["run_dir"]) == (9, "runs/mine")


def test_a_shell_can_complete_the_names_of_runs(here: Path) -> None:
    make_run(here / "runs" / "mine-1", 1, ended=True)
    environment = {**os.environ, "_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": "shoal report mi", "COMP_CWORD": "2"}
    script = "import sys; sys.argv[0] = 'shoal'; from shoal.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["mine-1"], done.stderr


def test_a_model_answers_line_by_line_and_remembers_until_told_otherwise(
    tiny_model_dir: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are the most likely tokens, so the same conversation has the same answer."""
    asked = ["hello", "again", "/new", "hello"]
    reads, writes = os.pipe()
    os.write(writes, "\n".join(asked).encode())
    os.close(writes)
    with open(reads) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        done = shoal("chat", str(tiny_model_dir), "--max-tokens", "20", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    heading, first, second, _, third = done.stdout.rstrip("\n").split("\n> ")[:5]
    assert heading.startswith(str(tiny_model_dir))
    assert first == third != second
    assert first.strip()


async def test_a_line_that_is_typed_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    with open(reads) as typed, open(writes, "w") as types:  # noqa: ASYNC230
        monkeypatch.setattr(sys, "stdin", typed)
        line = asyncio.create_task(Prompt().line())
        await asyncio.sleep(0)
        print("hello", file=types, flush=True)
        await until(lambda: line.done() or bool(faults))
        assert not faults
        assert await line == "hello"


def test_a_run_without_a_model_cannot_be_talked_with(here: Path, capsys) -> None:
    make_run(here / "runs" / "mine", 2, ended=False)
    with pytest.raises(SystemExit):
        main(["chat", "mine"])
    assert "has no model yet" in capsys.readouterr().err
