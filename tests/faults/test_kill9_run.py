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

from shoal.buffer.audit import audit

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
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    _, alive = psutil.wait_procs(children, timeout=10)
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
    assert json.loads(out.splitlines()[-1])["steps"] == STEPS - before.steps
    assert "resumed" in events(tmp_path / "run")
    assert "replay_not_exact" not in events(tmp_path / "run")


@pytest.mark.parametrize("name", ["engine", "trainer"])
def test_a_killed_child_ends_the_run_with_a_sentence_and_the_run_can_go_on(
    tmp_path: Path, tiny_model_dir: Path, name: str
) -> None:
    first = start(tmp_path, tiny_model_dir)
    wait_for_steps(tmp_path / "run", 3, first)
    (victim,) = [
        child
        for child in psutil.Process(first.pid).children(recursive=True)
        if any(f"shoal.{'engine.server' if name == 'engine' else 'train.worker'}" in part for part in child.cmdline())
    ]
    victim.kill()
    _, err = first.communicate(timeout=60)
    assert first.returncode == 2
    assert f"the {name} process ended with signal 9" in err
    assert "--resume" in err
    second = start(tmp_path, tiny_model_dir, "--resume")
    _, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    assert report.steps == STEPS
