"""`python -m experiments.packing [--quick] [--only KEY] [--results D]`; run it on a machine that does nothing else.

A key is the spread of the lengths.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.packing import compared
from benchmarks.rows import groups
from experiments.grid import Grid, Record, markdown

HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, {"sigmas": [0.0, 1.0], "groups": 1, "padded_batches": [4], "rounds": 1})
    plan = grid.plan
    keys = [f"{sigma:g}" for sigma in plan["sigmas"]]

    def measure(key: str) -> Record:
        rows = [row for group in groups(plan["groups"], shared_prompts=False, sigma=float(key)) for row in group]
        return {"sigma": float(key), **compared(rows, plan["padded_batches"], plan["rounds"])}

    if cells := grid.completed(keys, measure):
        grid.write(cells, table(cells))
        draw(grid.results / "packing.png", cells)


def table(cells: Sequence[Record]) -> str:
    """By spread of the lengths."""
    rows = [
        [
            f"{cell['sigma']:g}",
            f"{cell['longest']}",
            f"{cell['useful_share']:.2f}",
            f"{cell['attention_useful_share']:.2f}",
            f"{cell['padded_useful_share']:.2f}",
            f"{cell['packed_tokens_per_s']:.0f}",
            f"{cell['speedup']:.2f}",
            f"{cell['speedup_sorted']:.2f}",
        ]
        for cell in cells
    ]
    head = ["sigma", "longest row", "useful, packed", "useful in attention", "useful, padded"]
    return markdown([*head, "packed tokens/s", "over padded", "over padded and sorted"], rows)


def draw(path: Path, cells: Sequence[Record]) -> None:
    """Speedup by spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, label in (("speedup", "over padded rows as they come"), ("speedup_sorted", "over padded, sorted rows")):
        axes.plot([cell["sigma"] for cell in cells], [cell[name] for cell in cells], marker="o", label=label)
    axes.axhline(1, color="#66727f", linestyle=":")
    axes.set_xlabel("spread of the lognormal lengths, sigma")
    axes.set_ylabel("speed of packed rows")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1:])
