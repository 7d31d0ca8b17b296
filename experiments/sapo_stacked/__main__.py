"""`python -m experiments.sapo_stacked [--quick] [--only KEY] [--results D]`: what sharing is worth; see claim.md."""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from experiments.grid import Grid, Record, finished
from experiments.sapo_stacked.picture import draw
from experiments.sapo_stacked.questions import Question, drawn, split
from experiments.sapo_stacked.rounds import Cell, Scale, run_cell, warm_weights
from experiments.sapo_stacked.verdict import comparisons, summary, table

HERE = Path(__file__).parent
QUICK = Scale(nodes=3, rounds=3, each=4, eval_every=3, warm_steps=3)


def main(arguments: list[str]) -> None:
    """Runs the experiment, or what is left of it."""
    grid = Grid.asked(arguments, HERE)
    plan = grid.plan
    scale = QUICK if grid.quick else Scale()

    @cache
    def questions() -> tuple[list[Question], list[Question]]:
        training, held_out = split(drawn(200 if grid.quick else 3000))
        return training, fewer(held_out, plan["held_out_per_task"])

    @cache
    def warm(regime: str) -> dict[str, torch.Tensor]:
        return warm_weights(scale, questions()[0], plan["regimes"][regime])

    def measure(key: str) -> Record:
        regime, cell, seed = key.rsplit(":", 2)
        return run_cell(Cell.of(cell), int(seed), scale, warm(regime), *questions())

    planned = keys_of(plan, quick=grid.quick)
    grid.completed(planned, measure)
    found = finished(grid.results)
    runs = {
        key: found[key]
        for regime in plan["regimes"]
        for key in planned
        if key in found and key.startswith(f"{regime}:")
    }
    cells = summary(runs)
    grid.write(cells, table(cells) + "\n" + comparisons(runs))
    draw(grid.results, runs)


def keys_of(plan: Record, *, quick: bool) -> list[str]:
    """Regime, cell and seed; the paper's cells of all regimes before the controls."""
    if quick:
        return [f"{next(iter(plan['regimes']))}:{cell}:0" for cell in ("8/0", "4/4", "8/0-dynamic")]
    return [
        f"{regime}:{cell}:{seed}"
        for cells, regimes in ((plan["cells"], plan["regimes"]), (plan["controls"], plan["controls_in"]))
        for seed in plan["seeds"]
        for regime in regimes
        for cell in cells
    ]


def fewer(held_out: Sequence[Question], per_task: int) -> list[Question]:
    """The first few of every specialty."""
    tasks = sorted({one.task for one in held_out})
    return [one for task in tasks for one in [other for other in held_out if other.task == task][:per_task]]


if __name__ == "__main__":
    main(sys.argv[1:])
