"""Ctrl-C and SIGTERM end a run in bounded time with a sentence, whatever process of it is stopped."""

import signal
from pathlib import Path

import pytest

from shoal.experience.audit import audit
from shoal.run.blocking import END_S
from train_runs import children, start, wait_for_steps

LEAVING_S = 10.0
"""Seconds on a busy machine from the bound of a run's end to the end of its process."""


@pytest.mark.parametrize(
    ("told", "stopped"),
    [
        (signal.SIGTERM, ""),
        (signal.SIGINT, "shoal.engine.http_server"),
        (signal.SIGTERM, "shoal.trainer.worker"),
        (signal.SIGTERM, "shoal.reward.worker"),
    ],
)
def test_a_run_that_is_told_to_stop_ends_whatever_is_stopped(
    told: signal.Signals, stopped: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = start(tmp_path, tiny_model_dir)
    wait_for_steps(tmp_path / "run", 2, run)
    for child in children(run, stopped):
        child.send_signal(signal.SIGSTOP)
    run.send_signal(told)
    _, err = run.communicate(timeout=END_S + LEAVING_S)
    assert run.returncode == 130, err
    assert "go on with" in err
    assert "Traceback" not in err
    assert audit(tmp_path / "run").ok
