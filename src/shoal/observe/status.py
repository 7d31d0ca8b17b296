"""Reads a run's state, task by task, from its run directory alone, without disturbing a running run."""

from math import isnan
from pathlib import Path
from typing import Any

from shoal.errors import RunDirError
from shoal.experience.counts import task_counts
from shoal.experience.log import FILE
from shoal.observe.forecast import LEAST, forecast
from shoal.observe.metrics import WARNINGS
from shoal.observe.runs import RunRecords, column, mean, read_run

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
