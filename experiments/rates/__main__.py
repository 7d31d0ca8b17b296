"""`python -m experiments.rates [--only KEY] [--results D]`: rates, batches and data sets that SmolLM2 learns from.

A key is task/rate/groups/seed; the rate is of full weights, or of adapters with an L before it.
"""

import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from experiments.grid import Grid, Record, markdown
from experiments.rates.datasets import NUMBERS, REWRITTEN, SMALLER, TRIED
from shoal.config import parse
from shoal.observe.metrics import read_records
from shoal.run.training import run_training

HERE = Path(__file__).parent
SUMS = HERE.parents[1] / "examples" / "smollm2"
GROUPS = 6
RATE = "1e-05"
LATE = 5
"""Steps at the start and at the end whose means are compared."""


def main(arguments: list[str]) -> None:
    """Runs what is missing, then writes the table."""
    grid = Grid.asked(arguments, HERE, threads=None)
    if done := grid.completed(keys(grid.plan), lambda key: course(grid.plan, *key.split("/"))):
        cells = summaries(done)
        grid.write(cells, table(cells))


def keys(plan: Mapping[str, Any]) -> list[str]:
    """The rewritten data sets and the sums by one seed, those with smaller numbers by all seeds."""
    rates = [f"{rate:g}" for rate in plan["full"]] + [f"L{rate:g}" for rate in plan["adapters"]]
    found = [f"{name}/{RATE}/{GROUPS}/0" for name in REWRITTEN]
    found += [f"sums/{rate}/{GROUPS}/0" for rate in rates] + [f"sums/{RATE}/{groups}/0" for groups in plan["groups"]]
    return found + [f"{name}/{RATE}/{GROUPS}/{seed}" for seed in plan["seeds"] for name in NUMBERS]


def course(plan: Mapping[str, Any], task: str, rate: str, groups: str, seed: str) -> Record:
    """Trains one cell; gives the held-out accuracy before and after, and means of the first and the last steps."""
    with tempfile.TemporaryDirectory(prefix="shoal-rates-") as folder:
        adapters = {"lora": {"rank": plan["rank"]}} if rate.startswith("L") else {}
        config = {
            **{"run_dir": f"{folder}/run", "seed": int(seed), "model": {"path": "smollm2", "dtype": "auto"}},
            "tasks": [sums() if task == "sums" else {"name": task, "reward": "correct", **(TRIED | SMALLER)[task]}],
            "rollout": {"group_size": plan["group_size"], "max_tokens": 32},
            "train": {
                **{"steps": plan["steps"], "groups_per_step": int(groups), "lr": float(rate.lstrip("L"))},
                **adapters,
            },
            "eval": {"every_steps": 0, "questions": plan["questions"]},
            "checkpoint": {"every_steps": plan["steps"]},
        }
        run_training(parse(config))
        records = read_records(Path(folder) / "run" / "metrics.jsonl")
    evals = [one for one in records if one["kind"] == "eval"]
    steps = [one for one in records if one["kind"] == "step"]
    found: Record = {"task": task, "rate": rate, "groups": int(groups), "seed": int(seed)}
    found |= {name: [evals[0][name], evals[-1][name]] for name in ("sampled", "greedy")}
    for name in ("reward", "length_mean", "cut_share", "informative_share"):
        found[name] = ends([float(str(step[name])) for step in steps if name in step])
    found["minutes"] = round(float(str(records[-1]["time_s"])) / 60, 1)
    return found


def sums() -> Record:
    """The task of examples/smollm2."""
    task: Record = tomllib.loads((SUMS / "train.toml").read_text())["tasks"][0]
    return {**task, "path": str(SUMS / "questions.jsonl")}


def ends(values: Sequence[float]) -> list[float]:
    """Means of the first and of the last values."""
    return [round(fmean(part), 4) for part in (values[:LATE], values[-LATE:])] if values else []


def summaries(runs: Sequence[Record]) -> list[Record]:
    """Cells with their seeds together: accuracies, and Student's 95 % interval of the gain from three seeds on."""
    cells: dict[tuple[object, ...], list[Record]] = {}
    for run in runs:
        cells.setdefault((run["task"], run["rate"], run["groups"]), []).append(run)
    return [summary(one) for one in cells.values()]


def summary(runs: Sequence[Any]) -> Record:
    """One cell."""
    found: Record = {name: runs[0][name] for name in ("task", "rate", "groups")} | {"seeds": len(runs)}
    for name in ("sampled", "greedy"):
        before, after = zip(*(run[name] for run in runs), strict=True)
        gains = [late - early for early, late in zip(before, after, strict=True)]
        found |= {f"{name}_before": round(fmean(before), 3), f"{name}_after": round(fmean(after), 3)}
        if len(gains) > 2:
            half = float(student.ppf(0.975, len(gains) - 1)) * stdev(gains) / len(gains) ** 0.5
            found[f"{name}_gain"] = [round(fmean(gains) - half, 3), round(fmean(gains) + half, 3)]
    for name in ("length_mean", "cut_share", "informative_share"):
        found[name] = [round(fmean(part), 2) for part in zip(*(run[name] for run in runs), strict=True)]
    found["minutes"] = round(fmean(run["minutes"] for run in runs), 1)
    return found


def table(cells: Sequence[Any]) -> str:
    """By task, rate and batch."""
    head = ["task", "rate", "groups", "seeds", "sampled", "95 % of the gain", "greedy", "95 % of the gain"]
    head += ["tokens", "cut", "with signal", "minutes"]
    rows = []
    for cell in cells:
        row = [cell["task"], cell["rate"], str(cell["groups"]), str(cell["seeds"])]
        for name in ("sampled", "greedy"):
            row.append(f"{cell[f'{name}_before']:.3f} to {cell[f'{name}_after']:.3f}")
            row.append(" to ".join(f"{one:+.3f}" for one in cell.get(f"{name}_gain", [])))
        shown = zip(("length_mean", "cut_share", "informative_share"), ("{:.0f}", "{:.2f}", "{:.2f}"), strict=True)
        row += [" to ".join(form.format(one) for one in cell[name]) for name, form in shown]
        rows.append([*row, str(cell["minutes"])])
    return markdown(head, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
