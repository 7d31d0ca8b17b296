"""Runs of `shoal train` in processes of their own, on a few questions, and what they wrote."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from engine_server import engine_here
from left_processes import ended_with_its_test
from shoal.config import load
from shoal.run.training import run_training

STEPS = 40


def start(folder: Path, model: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    """`shoal train` in the background, where Ray cannot be imported."""
    (folder / "no" / "ray").mkdir(parents=True, exist_ok=True)
    (folder / "no" / "ray" / "__init__.py").write_text(
        "raise AssertionError('a run without cluster.address needs no Ray')"
    )
    write_config(folder, model)
    command = [sys.executable, "-m", "shoal.cli", "train", "config.toml", *more]
    return ended_with_its_test(
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder / "no"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def write_config(folder: Path, model: Path) -> None:
    """Writes config.toml and its questions."""
    (folder / "data.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"say {letter}{n}", "answer": letter}) for letter in "abcd" for n in range(8))
    )
    (folder / "config.toml").write_text(
        f'run_dir = "run"\n[[tasks]]\nname = "say"\nservice = "jsonl"\npath = "data.jsonl"\nscorer = "contains"\n'
        f'[model]\npath = "{model}"\n[rollout]\ngroup_size = 4\nmax_tokens = 8\n'
        f"[train]\nsteps = {STEPS}\ngroups_per_step = 2\nlr = 1e-3\n"
        f"[eval]\nevery_steps = 0\nquestions = 2\n[checkpoint]\nevery_steps = 7\n"
    )


def finished(folder: Path, model: Path, *more: str) -> Path:
    """Directory of a run that has ended well, in this process and with an engine in a thread of it."""
    write_config(folder, model)
    with engine_here(model) as engine, contextlib.chdir(folder):
        trained(Path("config.toml"), engine, *more)
    return folder / "run"


def trained(config: Path, *options: str) -> Mapping[str, object]:
    """Figures of a run in this process, without the report that `shoal train` draws at the end."""
    settings = [option.removeprefix("--") for option in options]
    overrides = [one for one in settings if one != "resume"]
    return run_training(load(config, overrides), resume="resume" in settings).figures


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


def children(process: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    """The processes of a run that run a module; others come and go."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] * (module in child.cmdline())
    return found
