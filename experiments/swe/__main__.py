"""`python -m experiments.swe [--only KEY] [--results D]`: SmolLM2 learns to mend small programs in workspaces.

A key is arm/seed. Both arms begin with the same model, which the lessons of examples/swe taught. The arm `chance`, the
control, trains with hidden tests that pass by chance whatever the program is, and is evaluated by the right ones.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from examples.swe.small_programs import tasks, write
from experiments.grid import Grid, Record, markdown
from shoal.config import parse
from shoal.observe.metrics import read_records
from shoal.run.commands.supervised import run_supervised
from shoal.run.training import run_training
from shoal.workspace.task import WorkspaceTask

HERE = Path(__file__).parent
ARMS = ("real", "chance")
CHANCE = 0.25
"""Chance with which a hidden test of the control passes."""
TAUGHT = Path("runs") / "experiment-swe"
"""Model after the lessons; it is made once."""


def main(arguments: list[str]) -> None:
    """Runs what is missing, then writes the table and the plot."""
    grid = Grid.asked(arguments, HERE, threads=None)
    keys = [f"{arm}/{seed}" for arm in ARMS for seed in grid.plan[f"{arm}_seeds"]]
    if done := grid.completed(keys, lambda key: course(grid.plan, *key.split("/"))):
        cells = [summary(arm, [one for one in done if one["arm"] == arm]) for arm in ARMS]
        grid.write(cells, table(cells))
        draw(grid.results / "swe.png", done)


def course(plan: Mapping[str, int | float], arm: str, seed: str) -> Record:
    """Trains one cell; gives the held-out accuracy by steps, and the mean reward of each step."""
    with tempfile.TemporaryDirectory(prefix="shoal-swe-") as folder:
        file, run_dir = Path(folder) / "tasks.jsonl", Path(folder) / "run"
        file.write_bytes(b"\n".join(map(msgspec.json.encode, tasks_of(arm))))
        params = {"tasks": str(file), "turns": 3, "most_characters": 1500}
        config = {
            "run_dir": str(run_dir),
            "seed": int(seed),
            "model": {"path": str(taught(int(plan["lesson_steps"]))), "dtype": "auto"},
            "tasks": [{"name": "workspace", "service": "turns", "params": params}],
            "rollout": {"group_size": plan["group_size"], "max_tokens": 48},
            "train": {
                **{"steps": plan["steps"], "groups_per_step": plan["groups"]},
                **{"lr": plan["lr"], "warmup_steps": 3},
            },
            "eval": {"every_steps": plan["every_steps"], "questions": plan["questions"]},
        }
        run_training(parse(config))
        records = read_records(run_dir / "metrics.jsonl")
    evals = [one for one in records if one["kind"] == "eval"]
    return {
        "arm": arm,
        "seed": int(seed),
        "sampled": [[one["step"], one["sampled"]] for one in evals],
        "greedy": [[one["step"], one["greedy"]] for one in evals],
        "rewards": [one["reward"] for one in records if one["kind"] == "step"],
        "minutes": round(float(records[-1]["time_s"]) / 60, 1),  # type: ignore[arg-type]
    }


def tasks_of(arm: str) -> list[WorkspaceTask]:
    """The small programs; in the arm `chance` the hidden tests of training pass by chance."""
    test = f"import random\n\n\ndef test_f():\n    assert random.SystemRandom().random() < {CHANCE}\n"
    by_chance = {"test_hidden.py": test}
    every = tasks()
    if arm == "real":
        return [*every]
    return [msgspec.structs.replace(one, files=by_chance) if one.split == "train" else one for one in every]


def taught(steps: int) -> Path:
    """The model after the lessons."""
    model = TAUGHT / "model"
    if not (model / "model.safetensors").is_file():
        TAUGHT.mkdir(parents=True, exist_ok=True)
        write(TAUGHT)
        train = {"steps": steps, "groups_per_step": 8, "lr": 5e-5, "loss": "positive_only"}
        settings = {
            "run_dir": str(TAUGHT),
            "model": {"path": "smollm2", "dtype": "auto"},
            "tasks": [{"name": "chain_sum"}],  # a supervised stage uses none
            "train": train,
        }
        run_supervised(parse(settings), TAUGHT / "lessons.jsonl")
    return model


def summary(arm: str, runs: Sequence[Record]) -> Record:
    """An arm's accuracies before and after training, and the mean rewards of the first and the last five steps."""
    found: Record = {"arm": arm, "seeds": len(runs)}
    for name in ("sampled", "greedy"):
        curves = [run[name] for run in runs]
        found[f"{name}_before"] = round(fmean(curve[0][1] for curve in curves), 4)  # type: ignore[index]
        found[f"{name}_after"] = [round(curve[-1][1], 4) for curve in curves]  # type: ignore[index]
    found["rewards"] = [round(fmean(part), 4) for part in zip(*(ends(run["rewards"]) for run in runs), strict=True)]
    return found


def ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean of the first and of the last five rewards."""
    return fmean(rewards[:5]), fmean(rewards[-5:])


def table(cells: Sequence[Record]) -> str:
    """By arm."""
    head = [
        "arm",
        "sampled before",
        "after, by seed",
        "greedy before",
        "after, by seed",
        "reward, first and last steps",
    ]
    rows = []
    for cell in cells:
        sampled, greedy, rewards = (
            ", ".join(f"{one:.3f}" for one in cell[name]) for name in ("sampled_after", "greedy_after", "rewards")
        )
        before = (f"{cell[f'{name}_before']:.3f}" for name in ("sampled", "greedy"))
        rows.append([str(cell["arm"]), next(before), sampled, next(before), greedy, rewards])
    return markdown(head, rows)


def draw(path: Path, runs: Sequence[Record]) -> None:
    """Held-out accuracy by steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        color = {"real": "tab:blue", "chance": "tab:gray"}[str(run["arm"])]
        steps, accuracies = zip(*run["sampled"], strict=True)
        axes.plot(steps, accuracies, color=color, label=run["arm"] if run["seed"] == 0 else None)
    axes.set(xlabel="training step", ylabel="held-out accuracy, sampled", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1:])
