"""State of runs from their directories alone, without disturbing a running run: task by task, or all at a glance."""

import math
import time
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import RunDirError
from shoal.experience.counts import task_counts
from shoal.experience.log import FILE
from shoal.observe.forecast import LEAST, forecast
from shoal.observe.metrics import METRICS, WARNINGS, RunRecords, column, known, mean, number, read_run
from shoal.observe.progress import duration

MOST_WARNINGS = 8
LATELY = 20
"""Steps in the means of rewards and rates."""
RUN_NUMBERS = ("reward", "tokens_per_s", "staleness_mean", "engine_busy", "trainer_busy")


def status(run_dir: Path, goal: float | None = None) -> dict[str, Any]:
    """State of the run and, under `tasks`, of each task's groups. Raises `RunDirError`.

    With a `goal`, an accuracy, `forecast` tells whether the run will get there; None without enough evaluations.
    """
    if not (run_dir / FILE).is_file():
        raise RunDirError(f"{run_dir}: expected a run directory with {FILE}, found none")
    run = read_run(run_dir)
    counts = task_counts(run_dir)
    weights = {task.name: task.weight for task in run.config.tasks} if run.config else {}
    consumed = sum(task.consumed for task in counts.values())  # without peers' groups, which have no share
    tasks = {}
    for name, task in sorted(counts.items()):
        tasks[name] = {
            "started": task.started,
            "running": task.in_flight,
            "waiting": task.waiting,
            "trained": task.consumed,
            "trained_of_peers": task.external,
            "failed": dict(task.failed),
            "dropped": dict(task.dropped),
            "share": task.consumed / consumed if consumed else None,
            "target": weights[name] / sum(weights.values()) if name in weights else None,
            **{number: lately(run, f"{number}/{name}") for number in ("reward", "solve_rate", "tokens_per_s")},
        }
    return {
        "steps": len(run.steps),
        "of": run.config.train.steps if run.config else None,
        "version": lately(run, "version", 1),
        **{name: lately(run, name) for name in RUN_NUMBERS},
        "warnings": warnings_of(run),
        "ratio_changes": [event for event in run.events if event.get("name") == "ratio"],
        "tasks": tasks,
        **({} if goal is None else {"forecast": _forecast(run, goal)}),
    }


def is_doubted(values: dict[str, Any]) -> bool:
    """Whether a status says that the run will not get to its goal."""
    return bool(values.get("forecast")) and not values["forecast"]["gets_there"]


def _forecast(run: RunRecords, goal: float) -> dict[str, Any] | None:
    rows = zip(*(column(run.evals, name) for name in ("step", "sampled", "questions")), strict=True)
    known = [row for row in rows if not isnan(sum(row))]
    if run.config is None or not known:
        return None
    steps, accuracies, questions = zip(*known, strict=True)
    found = forecast(steps, accuracies, min(questions), run.config.train.steps)
    if found is None:
        return None
    said = {"gets_there": found.gets_there(goal), "sentence": found.sentence(goal)}
    return {"goal": goal, "chance": found.chance(goal), "bounds": found.bounds, **said}


def status_lines(values: dict[str, Any]) -> list[str]:
    """Formats a status for people: a line for the run, per task, and per reason."""
    tasks: dict[str, dict[str, Any]] = values["tasks"]
    lines = [
        f"step {values['steps']} of {values['of'] or '?'}, version {_number(values['version'])}, "
        f"reward {_number(values['reward'])}, {_number(values['tokens_per_s'])} tokens/s, "
        f"staleness {_number(values['staleness_mean'])}, "
        f"busy: engine {_number(values['engine_busy'])}, trainer {_number(values['trainer_busy'])}"
    ]
    lines += [f"warning: {warning}" for warning in values["warnings"]]
    if "forecast" in values:
        found = values["forecast"]
        lines.append(
            found["sentence"]
            if found
            else f"no forecast: it needs {LEAST} held-out evaluations, and a quarter of the steps"
        )
    width = max((len(name) for name in tasks), default=0)
    for name, task in tasks.items():
        lines.append(
            f"{name:<{width}}  running {task['running']}, waiting {task['waiting']}, trained {task['trained']} of "
            f"{task['started']} started; share {_number(task['share'])} (target {_number(task['target'])}), "
            f"reward {_number(task['reward'])}, solved {_number(task['solve_rate'])}, "
            f"{_number(task['tokens_per_s'])} tokens/s"
        )
        for outcome in ("failed", "dropped"):
            lines += [f"{'':<{width}}  {outcome} {number}: {reason}" for reason, number in task[outcome].items()]
    return lines


def warnings_of(run: RunRecords) -> list[str]:
    """Texts of the run's warnings about failures and uninformative steps, each once, the newest last."""
    reasons = [str(event.get("reason")) for event in run.events if event.get("name") in WARNINGS]
    return list(dict.fromkeys(reversed(reasons)))[:MOST_WARNINGS][::-1]


def lately(run: RunRecords, name: str, steps: int = LATELY) -> float | None:
    """Mean over the last steps that have the value; None without any."""
    value = mean(run.column(name)[-steps:])
    return None if isnan(value) else value


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float | int) else "unknown"


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


STATUS = Path("swarm") / "status.json"


def last_step(run: RunRecords) -> int | None:
    """Number of the newest step; None before the first."""
    return int(number(run.steps[-1], "step")) if run.steps else None


def lead(run_dir: Path, run: RunRecords) -> str:
    """Model, tasks, state and duration of a run in one line."""
    model = f"{run.config.model.path} on {', '.join(task.name for task in run.config.tasks)}, " if run.config else ""
    took_s = max((number(one, "time_s", 0.0) for one in (*run.steps, *run.evals, *run.events)), default=0.0)
    state = state_of(run_dir)
    return f"{model}{state} {'for' if state == 'running' else 'after'} {duration(took_s)}"


def figures(run: RunRecords) -> list[tuple[str, str]]:
    """Where a run stands, as label and figure."""
    is_same = all(one.get("sampled_reward") == one.get("sampled") for one in run.evals)
    of = f" of {run.config.train.steps}" if run.config else ""
    numbers = (
        ("reward", lately(run, "reward"), ".3f"),
        ("tokens/s", lately(run, "tokens_per_s"), ",.0f"),
        ("staleness", lately(run, "staleness_mean"), ".2f"),
        ("engine busy", lately(run, "engine_busy"), ".0%"),
        ("trainer busy", lately(run, "trainer_busy"), ".0%"),
    )
    shown = [(label, format(value, form)) for label, value, form in numbers if isinstance(value, int | float)]
    scores = {"held-out reward": "sampled_reward"} | ({} if is_same else {"held-out full marks": "sampled"})
    held_out = [(label, _first_to_last(run, name)) for label, name in scores.items()]
    return [("step", f"{len(run.steps)}{of}"), *shown, *((label, text) for label, text in held_out if text)]


def _first_to_last(run: RunRecords, name: str) -> str:
    """A score of the first and of the last evaluation; empty without any."""
    scores = [f"{value:.3f}" for value in known(column(run.evals, name))]
    return " to ".join((scores[0], scores[-1])) if len(scores) > 1 else "".join(scores)


def swarm_status(run_dir: Path) -> Mapping[str, object] | None:
    """Newest status of a node; None when the run is in no swarm."""
    try:
        status = msgspec.json.decode((run_dir / STATUS).read_bytes(), type=dict[str, object])
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    written_s = status.pop("time_s", None)
    if isinstance(written_s, int | float):
        status["written"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
    return status


def influence(run: RunRecords) -> str:
    """Sentence on the contribution of peers' groups to the last steps; empty for a run that trained none."""
    groups, theirs, own = (lately(run, name) for name in ("external", "reward_external", "reward"))
    if not groups or theirs is None or own is None:
        return ""
    better = "above" if theirs > own else "below" if theirs < own else "equal to"
    return (
        f"Over the last {min(LATELY, len(run.steps))} steps a step trained {groups:.2g} groups of peers. Their "
        f"answers earned {theirs:.3f} by this node's own rewards, {better} the {own:.3f} that its answers earned."
    )
