"""`python -m experiments.interrupt [--quick] [--only KEY] [--results D]`; run it on a machine that does nothing else.

A key is update/seed: recompute and keep interrupt running answers at a new Version, drain waits for them.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.model import write_ending_model
from experiments.grid import Grid, Record, markdown
from experiments.timed import measured_run

HERE = Path(__file__).parent
QUICK = ("train.steps=2", "train.groups_per_step=2", "rollout.max_tokens=16")
NAMES = ("samples_per_s", "tokens_per_s", "engine_busy", "trainer_busy")
WALL, CPU = "tokens_per_s", "tokens_per_engine_cpu_s"
PAPER = "AReaL (arXiv 2505.24298): interruptible generation +12 % throughput with 1.5B, +17 % with 7B parameters."


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, {"seeds": [0], "updates": ["recompute", "drain"]}, threads=None)
    plan = grid.plan
    keys = [f"{update}/{seed}" for seed in plan["seeds"] for update in plan["updates"]]

    def measure(key: str) -> Record:
        update, seed = key.split("/")
        with tempfile.TemporaryDirectory() as folder:
            inputs = written_inputs(Path(folder))
            settings = [*inputs, f"seed={seed}", f"engine.on_update={update}"]
            timed = measured_run(plan["run"], [*(QUICK if grid.quick else ()), *settings])
        samples = (2 if grid.quick else plan["run"]["train"]["groups_per_step"]) * plan["run"]["rollout"]["group_size"]
        return {
            "update": update,
            "seed": int(seed),
            "staleness_mean": timed.mean("staleness_mean"),
            "length_mean": timed.mean("length_mean"),
            "tokens_per_engine_cpu_s": timed.tokens_per_engine_cpu_s(samples),
            **{name: timed.rate(name) for name in NAMES},
        }

    if runs := grid.completed(keys, measure):
        cells = summary(runs)
        grid.write(cells, table(cells))
        draw(grid.results / "interrupt.png", cells)


def written_inputs(folder: Path) -> list[str]:
    """Writes model and questions; the settings that name them."""
    write_ending_model(folder / "model")
    rows = [{"prompt": f"{i:08d}", "answer": "abcdefghijklmnopqrstuvwxyz"[i % 26]} for i in range(2000)]
    (folder / "letters.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"model.path={folder / 'model'}", f"tasks.0.path={folder / 'letters.jsonl'}"]


def summary(runs: Sequence[Record]) -> list[Record]:
    """A record per way to update, means over the seeds; gains are over drain."""
    cells: list[Record] = []
    for update in dict.fromkeys(run["update"] for run in runs):
        same = [run for run in runs if run["update"] == update]
        means = {name: fmean(run[name] for run in same) for name in (*NAMES, "staleness_mean", "length_mean")}
        each = {f"{name}_each": [run[name] for run in same] for name in (WALL, CPU)}
        cells.append({"update": update, "seeds": len(same), **each, **means})
    (drain,) = [cell for cell in cells if cell["update"] == "drain"]
    for cell in cells:
        for name in (WALL, CPU):
            cell[f"{name}_gain"] = gain(cell[f"{name}_each"], drain[f"{name}_each"])
    return cells


def gain(ours: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """Of the mean over that of the others; None where something was not measured."""
    known, beside = ([x for x in xs if x is not None] for xs in (ours, others))
    return fmean(known) / fmean(beside) - 1 if len(known) == len(ours) and len(beside) == len(others) else None


def table(cells: Sequence[Record]) -> str:
    """By way to update."""

    def rates(cell: Record, name: str) -> list[str]:
        of_all = cell[f"{name}_gain"]
        each = " ".join("?" if x is None else f"{x:.0f}" for x in cell[f"{name}_each"])
        return [each, "?" if of_all is None else f"{of_all:+.0%}"]

    rows = [
        [
            cell["update"],
            *rates(cell, CPU),
            *rates(cell, WALL),
            f"{cell['staleness_mean']:.2f}",
            f"{cell['length_mean']:.0f}",
            f"{cell['engine_busy']:.0%}",
            f"{cell['trainer_busy']:.0%}",
        ]
        for cell in cells
    ]
    head = ["at a new Version", "tokens per CPU second of the engine", "over drain", "tokens/s", "over drain"]
    head += ["mean staleness", "mean length", "engine busy", "trainer busy"]
    return f"Each of {cells[0]['seeds']} seeds, and means. {PAPER}\n\n{markdown(head, rows)}"


def draw(path: Path, cells: Sequence[Record]) -> None:
    """Throughput as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.bar(
        [cell["update"] for cell in cells],
        [fmean(x or 0.0 for x in cell[f"{CPU}_each"]) for cell in cells],
        color="#2563c9",
        width=0.6,
    )
    axes.set_ylabel("tokens per CPU second of the engine")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1:])
