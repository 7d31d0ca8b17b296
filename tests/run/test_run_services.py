"""`shoal train` on tasks of the user's own: one in its process, one served by a process that is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.balance import __main__ as experiment
from experiments.balance.__main__ import described, draw
from shoal.config import load
from shoal.experience.audit import audit
from shoal.net.listening import free_port
from shoal.observe.status import status

HERE = Path(__file__).parents[1].joinpath("support")
STEPS = 10
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
steps = {steps}
groups_per_step = 2
lr = 1e-3
[eval]
questions = 2
every_steps = 0
"""


def shoal(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", *arguments], cwd=HERE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """Of a run whose served task was killed after the first step, and served again."""
    folder = tmp_path_factory.mktemp("services")
    config, port, run_dir = folder / "config.toml", free_port("127.0.0.2"), folder / "run"
    config.write_text(CONFIG.format(model=tiny_model_dir, port=port, steps=STEPS))
    serve = ("task", "serve", "service_tasks:Fast", "--orchestrator", f"http://127.0.0.2:{port}")
    with shoal(*serve) as first, shoal("train", str(config), f"--run_dir={run_dir}", "--json") as run:
        metrics = run_dir / "metrics.jsonl"
        while run.poll() is None and not (metrics.is_file() and '"step"' in metrics.read_text()):
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
        with shoal(*serve) as second:
            output, _ = run.communicate(timeout=240)
            second.terminate()
            assert second.wait(60) == 0
    assert run.returncode == 0
    assert json.loads(output.splitlines()[-1])["steps"] == STEPS
    return run_dir


def test_a_run_trains_on_tasks_of_the_user_s_own_here_and_elsewhere_and_outlives_their_process(run_dir: Path) -> None:
    result = audit(run_dir)
    assert result.ok, result.sentences()
    tasks = status(run_dir)["tasks"]
    assert {name: task["trained"] for name, task in tasks.items()} == {"fast": STEPS, "words": STEPS}  # type: ignore[attr-defined]
    assert tasks["fast"]["tokens_per_s"] > 0
    assert 0 <= tasks["fast"]["solve_rate"] <= 1


def test_experiments_of_balance_describe_shares_and_rewards_of_such_a_run(run_dir: Path, tmp_path: Path) -> None:
    figures = described(run_dir)
    assert figures["shares"] == {"fast": [0.5], "words": [0.5]}
    assert all(0 <= reward <= 1 for (reward,) in figures["rewards"].values())  # type: ignore[attr-defined]
    draw(tmp_path / "balance.png", figures)
    assert (tmp_path / "balance.png").stat().st_size > 1000
    for name in ("automatic", "joint"):
        assert len(load(Path(experiment.__file__).with_name(f"{name}.toml")).tasks) == 3
