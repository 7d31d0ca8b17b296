"""`shoal train` on tasks of the user's own: one in its process, one served by a process that is killed meanwhile."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from shoal.buffer.audit import audit

HERE = Path(__file__).parent
CONFIG = """
[model]
path = "{model}"
[[tasks]]
name = "words"
service = "python"
path = "service_tasks:words"
[[tasks]]
name = "fast"
service = "remote"
path = "127.0.0.2:{port}"
[rollout]
group_size = 4
max_tokens = 8
[train]
steps = 12
groups_per_step = 2
lr = 1e-3
[eval]
questions = 4
every_steps = 0
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        return int(listening.getsockname()[1])


def shoal(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", *arguments], cwd=HERE, stdout=subprocess.PIPE, text=True
    )


def test_a_run_trains_on_tasks_of_the_user_s_own_here_and_elsewhere_and_outlives_their_process(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config, port, run_dir = tmp_path / "config.toml", free_port(), tmp_path / "run"
    config.write_text(CONFIG.format(model=tiny_model_dir, port=port))
    serve = ("task", "serve", "service_tasks:Fast", "--orchestrator", f"http://127.0.0.2:{port}")
    with shoal(*serve) as first, shoal("train", str(config), f"--run_dir={run_dir}", "--json") as run:
        metrics = run_dir / "metrics.jsonl"
        while run.poll() is None and not (metrics.is_file() and '"step"' in metrics.read_text()):
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
        with shoal(*serve) as second:
            output, _ = run.communicate(timeout=120)
            second.terminate()
            assert second.wait(10) == 0
    assert run.returncode == 0
    assert json.loads(output.splitlines()[-1])["steps"] == 12
    result = audit(run_dir)
    assert result.ok, result.sentences()
    status = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "status", str(run_dir), "--json"], capture_output=True, check=True
    )
    tasks = json.loads(status.stdout)["tasks"]
    assert tasks["fast"]["trained"] + tasks["words"]["trained"] == 24
    assert abs(tasks["fast"]["trained"] - 12) <= 1
    assert tasks["fast"]["tokens_per_s"] > 0
    assert 0 <= tasks["fast"]["solve_rate"] <= 1
