"""Any process of a run may be killed at any moment: nothing is lost, nothing is trained twice."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from shoal.experience.audit import audit
from shoal.experience.checkpoint import checkpoints
from train_runs import STEPS, children, events, start, wait_for_steps


def test_a_killed_run_resumes_to_the_same_weights_without_loss_or_repetition(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    often = ("--checkpoint.asynchronous=true", "--checkpoint.every_steps=2")  # one is always being written
    first = start(tmp_path, tiny_model_dir, *often)
    wait_for_steps(tmp_path / "run", 10, first)
    processes = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, "a child outlived its parent"
    before = audit(tmp_path / "run")
    assert before.ok, before.sentences()
    assert max(one.step for one in checkpoints(tmp_path / "run")) >= 5
    second = start(tmp_path, tiny_model_dir, *often, "--resume", "--json")
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    after = audit(tmp_path / "run")
    assert after.ok, after.sentences()
    assert (after.steps, after.consumed) == (STEPS, 2 * STEPS)
    assert after.started >= before.started
    assert json.loads(out.splitlines()[-1])["steps"] == STEPS
    assert "resumed" in events(tmp_path / "run")
    assert "replay_not_exact" not in events(tmp_path / "run")


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_engine_is_started_again_and_the_run_loses_nothing(
    tmp_path: Path, tiny_model_dir: Path, count: int
) -> None:
    run = start(tmp_path, tiny_model_dir, f"--engine.count={count}", "--train.steps=30", "--json")
    wait_for_steps(tmp_path / "run", 5, run)
    engines = children(run, "shoal.engine.http_server")
    assert len(engines) == count
    engines[0].kill()
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 30
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
