"""`python -m experiments.packing [--quick] [--only KEY] [--results D]`; run it on a machine that does nothing else.

A key is the spread of the lengths.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.packing import compared
from benchmarks.rows import groups
from experiments.grid import Record, complete, finished, markdown

HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    parser = argparse.ArgumentParser(prog="experiments.packing")
    parser.add_argument("--only")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = tomllib.loads((HERE / "experiment.toml").read_text())
    if options.quick:
        plan |= {"sigmas": [0.0, 1.0], "groups": 1, "padded_batches": [4], "rounds": 1}
    keys = [f"{sigma:g}" for sigma in plan["sigmas"]]

    def measure(key: str) -> Record:
        rows = [row for group in groups(plan["groups"], shared_prompts=False, sigma=float(key)) for row in group]
        return {"sigma": float(key), **compared(rows, plan["padded_batches"], plan["rounds"])}

    complete(options.results, [options.only] if options.only else keys, measure)
    done = finished(options.results)
    if all(key in done for key in keys):
        cells = [done[key] for key in keys]
        (options.results / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
        (options.results / "results.md").write_text(table(cells))
        draw(options.results / "packing.png", cells)


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
