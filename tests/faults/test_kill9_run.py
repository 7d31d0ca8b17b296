"""Any process of a run may be killed at any moment: nothing is lost, nothing is trained twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shoal.experience.audit import audit

STEPS = 40


def start(folder: Path, model: Path, *more: str) -> subprocess.Popen[str]:
    """`shoal train` in the background."""
    (folder / "data.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"say {letter}{n}", "answer": letter}) for letter in "abcd" for n in range(8))
    )
    (folder / "config.toml").write_text(
        f'run_dir = "run"\n[[tasks]]\nname = "say"\nservice = "jsonl"\npath = "data.jsonl"\nscorer = "contains"\n'
        f'[model]\npath = "{model}"\n[rollout]\ngroup_size = 4\nmax_tokens = 8\n'
        f"[train]\nsteps = {STEPS}\ngroups_per_step = 2\nlr = 1e-3\n"
        f"[eval]\nevery_steps = 0\nquestions = 2\n[checkpoint]\nevery_steps = 7\n"
    )
    command = [sys.executable, "-m", "shoal.cli", "train", "config.toml", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Returns once the run has logged `count` steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count('"kind":"step"') >= count:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError(f"fewer than {count} steps in 120 s")


def events(run: Path) -> list[str]:
    """Names of the logged events."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["name"] for record in records if record["kind"] == "event"]


def test_a_killed_run_resumes_to_the_same_weights_without_loss_or_repetition(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    first = start(tmp_path, tiny_model_dir)
    wait_for_steps(tmp_path / "run", 10, first)
    processes = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, "a child outlived its parent"
    before = audit(tmp_path / "run")
    assert before.ok, before.sentences()
    second = start(tmp_path, tiny_model_dir, "--resume", "--json")
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    after = audit(tmp_path / "run")
    assert after.ok, after.sentences()
    assert (after.steps, after.consumed) == (STEPS, 2 * STEPS)
    assert after.started >= before.started
    assert json.loads(out.splitlines()[-1])["steps"] == STEPS
    assert "resumed" in events(tmp_path / "run")
    assert "replay_not_exact" not in events(tmp_path / "run")


def children(process: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    """The processes of a run that run a module."""
    return [child for child in psutil.Process(process.pid).children(recursive=True) if module in child.cmdline()]


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_engine_is_started_again_and_the_run_loses_nothing(
    tmp_path: Path, tiny_model_dir: Path, count: int
) -> None:
    run = start(tmp_path, tiny_model_dir, f"--engine.count={count}", "--train.steps=12", "--json")
    wait_for_steps(tmp_path / "run", 5, run)
    engines = children(run, "shoal.engine.http_server")
    assert len(engines) == count
    engines[0].kill()
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 12
    assert events(tmp_path / "run").count("engine_lost") == 1
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["failed"] for step in steps if step["kind"] == "step") == 0


def test_a_killed_trainer_ends_the_run_with_a_sentence_and_the_run_can_go_on(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    first = start(tmp_path, tiny_model_dir)
    wait_for_steps(tmp_path / "run", 3, first)
    (victim,) = children(first, "shoal.trainer.worker")
    victim.kill()
    _, err = first.communicate(timeout=60)
    assert first.returncode == 2
    assert "the trainer process ended with signal 9" in err
    assert "--resume" in err
    second = start(tmp_path, tiny_model_dir, "--resume")
    _, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    assert report.steps == STEPS
