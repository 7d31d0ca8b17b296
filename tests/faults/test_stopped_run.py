"""Ctrl-C and SIGTERM end a run in bounded time with a sentence, whatever process of it is stopped."""

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.experience.audit import audit
from shoal.experience.checkpoint import checkpoints
from shoal.experience.log import snapshot
from shoal.run.blocking import END_S, INTERRUPTED, SAVE_S
from train_runs import children, start, wait_for_steps

LEAVING_S = 60.0
"""Seconds on a busy machine from the bound of a run's end to the end of its process."""


@pytest.mark.parametrize(
    ("told", "stopped"),
    [
        (signal.SIGINT, ("shoal.engine.server.http_server",)),
        (signal.SIGTERM, ("shoal.engine.server.http_server",)),
        (signal.SIGTERM, ("shoal.trainer.worker", "shoal.reward.worker")),
    ],
)
def test_a_run_that_is_told_to_stop_ends_whatever_is_stopped(
    told: signal.Signals, stopped: tuple[str, ...], tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = start(tmp_path, tiny_model_dir)
    wait_for_steps(tmp_path / "run", 2, run)
    for child in itertools.chain(*(children(run, module) for module in stopped)):
        child.send_signal(signal.SIGSTOP)
    processes = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(told)
    saving_s = SAVE_S if told is signal.SIGTERM else 0.0
    _, err = run.communicate(timeout=saving_s + END_S + LEAVING_S)
    assert run.returncode == 130, err
    assert err.endswith("shoal: stopped; go on with: shoal train run/resolved.toml --resume\n")
    assert psutil.wait_procs(processes, timeout=LEAVING_S)[1] == []
    assert "Traceback" not in err
    assert audit(tmp_path / "run").ok


HANGING = """
import asyncio, threading
from shoal.run.blocking import run_blocking

async def main() -> None:
    print("up", flush=True)
    await asyncio.to_thread(threading.Event().wait)

run_blocking(main())
"""


def test_a_thread_that_hangs_cannot_keep_a_process_that_is_told_to_stop() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=END_S + LEAVING_S) == INTERRUPTED
        finally:
            process.kill()


def test_sigterm_saves_the_step_that_is_trained(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = start(tmp_path, tiny_model_dir, "--checkpoint.every_steps=1000")
    wait_for_steps(tmp_path / "run", 3, run)
    assert checkpoints(tmp_path / "run") == []
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=SAVE_S + END_S + LEAVING_S)
    assert run.returncode == 130, err
    (saved,) = checkpoints(tmp_path / "run")
    with snapshot(tmp_path / "run") as log:
        assert saved.step == log.execute("SELECT max(step) FROM steps").fetchone()[0] >= 2
