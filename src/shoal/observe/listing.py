"""The runs of a folder at a glance, read from their directories."""

import math
from collections.abc import Mapping
from pathlib import Path

from shoal.experience.log import FILE
from shoal.observe.runs import METRICS, column, known, read_run
from shoal.observe.status import lately

LOCK = "log.lock"
LOCKS = Path("/proc/locks")


def listed_runs(folder: Path) -> list[Mapping[str, float | str | None]]:
    """Figures of each run in a folder, sorted by time of last write."""
    found = {file.parent for name in (METRICS, FILE, "resolved.toml") for file in folder.glob(f"*/{name}")}
    locked = _locked_inodes()
    return sorted((_listed(run_dir, locked) for run_dir in found), key=lambda one: float(str(one["written_s"])))


def _listed(run_dir: Path, locked: frozenset[int]) -> Mapping[str, float | str | None]:
    run = read_run(run_dir)
    held_out = known(column(run.evals, "sampled_reward"))
    steps = max((int(value) for value in run.column("step") if math.isfinite(value)), default=0)
    written = (run_dir / METRICS, run_dir / FILE, run_dir / "resolved.toml")
    return {
        "name": run_dir.name,
        "state": state_of(run_dir, locked),
        "steps": steps,
        "of": run.config.train.steps if run.config else None,
        "reward": lately(run, "reward"),
        "eval_reward_before": held_out[0] if held_out else None,
        "eval_reward_after": held_out[-1] if len(held_out) > 1 else None,
        "written_s": max(path.stat().st_mtime for path in written if path.exists()),
        "model": run.config.model.path if run.config else "?",
        "tasks": ", ".join(task.name for task in run.config.tasks) if run.config else "?",
    }


def state_of(run_dir: Path, locked: frozenset[int] | None = None) -> str:
    """State of a run: running, ended or stopped; `locked` are the inodes of locked files, else read here.

    A running run holds its log's lock; a run that ended has written its model.
    """
    locked = _locked_inodes() if locked is None else locked
    lock = run_dir / LOCK
    if lock.exists() and lock.stat().st_ino in locked:
        return "running"
    return "ended" if (run_dir / "model").is_dir() else "stopped"


def _locked_inodes() -> frozenset[int]:
    """Inodes of locked files from /proc/locks: trying the lock could block a run that starts."""
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(int(line.split()[5].rpartition(":")[2]) for line in lines if " -> " not in line)
