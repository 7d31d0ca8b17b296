"""`python -m experiments.async_speedup [--quick] [--only KEY] [--results D]`, on a machine that does nothing else.

A key is eta/seed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.grid import Grid, Record, markdown
from experiments.timed import measured_run

HERE = Path(__file__).parent
QUICK = ("train.steps=4", "train.groups_per_step=2", "eval.questions=8", "eval.every_steps=2")
PAPER = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}
"""AReaL (arXiv 2505.24298): thousands of tokens per second of a 1.5B model on 8 GPUs, by eta."""


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, {"etas": [0, 1], "seeds": [0], "target": 0.0}, threads=None)
    plan = grid.plan
    keys = [f"{eta}/{seed}" for seed in plan["seeds"] for eta in plan["etas"]]

    def measure(key: str) -> Record:
        eta, seed = map(int, key.split("/"))
        timed = measured_run(
            plan["run"], [*(QUICK if grid.quick else ()), f"seed={seed}", f"asynchrony.max_staleness={eta}"]
        )
        return {
            "eta": eta,
            "seed": seed,
            "seconds_to_target": timed.seconds_to(plan["target"]),
            "tokens_per_s": timed.rate("tokens_per_s"),
            "samples_per_s": timed.rate("samples_per_s"),
            "engine_busy": timed.rate("engine_busy"),
            "trainer_busy": timed.rate("trainer_busy"),
            "staleness_mean": timed.mean("staleness_mean"),
            "accuracies": [list(pair) for pair in timed.accuracies],
        }

    if runs := grid.completed(keys, measure):
        cells = summary(runs)
        grid.write(cells, table(cells, plan["target"]))
        draw(grid.results / "async_speedup.png", runs, plan["target"])


def summary(runs: Sequence[Record]) -> list[Record]:
    """A record per eta, means over the seeds; `speedup` is over eta = 0."""
    cells: list[Record] = []
    for eta in dict.fromkeys(run["eta"] for run in runs):
        same = [run for run in runs if run["eta"] == eta]
        reached = [run["seconds_to_target"] for run in same]
        names = ("tokens_per_s", "samples_per_s", "engine_busy", "trainer_busy", "staleness_mean")
        cell: Record = {"eta": eta, "seeds": len(same), **{name: fmean(run[name] for run in same) for name in names}}
        cell["seconds_to_target"] = None if None in reached else fmean(reached)
        cells.append(cell)
    first = cells[0]
    for cell in cells:
        cell["throughput"] = cell["tokens_per_s"] / first["tokens_per_s"]
        known = cell["seconds_to_target"] and first["seconds_to_target"]
        cell["speedup"] = first["seconds_to_target"] / cell["seconds_to_target"] if known else None
    return cells


def table(cells: Sequence[Record], target: float) -> str:
    """By eta, beside the paper's throughput."""

    def optional(value: float | None, form: str) -> str:
        return "never" if value is None else format(value, form)

    rows = [
        [
            f"{cell['eta']}",
            optional(cell["seconds_to_target"], ".1f"),
            optional(cell["speedup"], ".2f"),
            f"{cell['tokens_per_s']:.0f}",
            f"{cell['throughput']:.2f}",
            f"{PAPER[cell['eta']] / PAPER[0]:.2f}",
            f"{cell['staleness_mean']:.2f}",
            f"{cell['engine_busy']:.0%}",
            f"{cell['trainer_busy']:.0%}",
        ]
        for cell in cells
    ]
    head = ["eta", f"seconds to {target:.0%}", "speedup", "tokens/s", "throughput", "AReaL's throughput"]
    head += ["mean staleness", "engine busy", "trainer busy"]
    return (
        f"Means over {cells[0]['seeds']} seeds; speedup and throughput are over eta = 0, AReaL's too (1.5B model, 8 "
        "GPUs).\n\n" + markdown(head, rows)
    )


def draw(path: Path, runs: Sequence[Record], target: float) -> None:
    """Held-out accuracy over the seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    etas = sorted({run["eta"] for run in runs})
    for i, eta in enumerate(etas):
        for k, run in enumerate(run for run in runs if run["eta"] == eta):
            label = f"eta = {eta}" if k == 0 else "_"
            axes.plot(*zip(*run["accuracies"], strict=True), color=f"C{i}", label=label, alpha=0.8)
    axes.axhline(target, color="#66727f", linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out accuracy, sampled")
    axes.grid(color="#e6eaee")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1:])
