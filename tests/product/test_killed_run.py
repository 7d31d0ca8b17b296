"""A whole run is killed in the middle and goes on."""

import json
import os
import signal
from pathlib import Path

import psutil

from shoal.experience.audit import audit
from shoal.experience.checkpoint import checkpoints
from train_runs import STEPS, events, start, wait_for_steps


def test_a_killed_run_resumes_to_the_same_weights_without_loss_or_repetition(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    often = ("--checkpoint.asynchronous=true", "--checkpoint.every_steps=2")  # one is always being written
    first = start(tmp_path, tiny_model_dir, *often)
    wait_for_steps(tmp_path / "run", 10, first)
    processes = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    _, alive = psutil.wait_procs(processes, timeout=60)
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
