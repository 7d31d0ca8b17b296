"""`python -m experiments.judge_figure [--quick] [--only KEY] [--results D]`: see claim.md."""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from torch import Tensor

from experiments.grid import Grid, Record, finished, markdown
from experiments.judge_figure.comparison import Judged, Point, compare, comparison_png
from experiments.judge_figure.judged import Judging
from experiments.sapo_stacked.nodes import Shape
from experiments.sapo_stacked.questions import Question, drawn, split
from experiments.sapo_stacked.rounds import Cell, Run, Scale, warm_weights
from shoal.swarm.judge.messages import Condition

HERE = Path(__file__).parent
QUICK = Scale(nodes=3, rounds=2, each=4, warm_steps=3)


def main(arguments: list[str]) -> None:
    """Runs the experiment, or what is left of it."""
    grid = Grid.asked(arguments, HERE)
    plan, scale = grid.plan, QUICK if grid.quick else Scale()

    @cache
    def questions() -> list[Question]:
        return split(drawn(100 if grid.quick else 3000))[0]

    def scale_of(size: str) -> Scale:
        width = plan["sizes"][size]
        return replace(scale, shape=Shape(width=width, feed_forward=3 * width))

    @cache
    def warm(size: str) -> dict[str, Tensor]:
        return warm_weights(scale_of(size), questions(), plan["rejected"])

    def measure(key: str) -> Record:
        size, condition, seed = key.split(":")
        cell = Cell.of(plan["conditions"][condition])
        run = Run(cell, int(seed), scale_of(size), warm(size), questions())
        every = 1 if grid.quick else plan["every_rounds"]
        return asyncio.run(judged(run, Condition(condition), f"{size}-{condition}-{seed}", every, plan["each"]))

    seeds = plan["seeds"][:1] if grid.quick else plan["seeds"]
    keys = [f"{size}:{one}:{seed}" for seed in seeds for size in plan["sizes"] for one in plan["conditions"]]
    grid.completed(keys, measure)
    write(grid, plan)


async def judged(run: Run, condition: Condition, name: str, every: int, each: int) -> Record:
    """Judges every node before the first round, and again after every few rounds."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-judge-"))
        judging = await stack.enter_async_context(Judging(Path(folder), name, run.scale.nodes, each))
        await judging.ask_all(run.nodes, condition, 0, run.generator)
        own = []
        for number in range(1, run.scale.rounds + 1):
            own.append(sum(run.round()[0]))
            judging.pass_time()
            if number % every == 0:
                await judging.ask_all(run.nodes, condition, number, run.generator)
        return {"judged": judging.results(), "cumulative": round(sum(own), 2)}


def write(grid: Grid, plan: Record) -> None:
    """The comparison of each size: a picture, a table, and the numbers."""
    runs, bin_rounds = finished(grid.results), int(str(plan["bin_rounds"]))
    tables, found = [], {}
    assert isinstance(plan["sizes"], dict)
    for size in plan["sizes"]:
        scores = [
            Judged(key, Condition(key.split(":")[1]), round_, score)
            for key, run in runs.items()
            if key.startswith(f"{size}:")
            for round_, score in means_of(run)
        ]
        points = compare(scores, bin_rounds=bin_rounds)
        (grid.results / f"figure3-{size}.png").write_bytes(comparison_png(points, bin_rounds))
        tables.append(f"## {size}\n\n{table(points)}")
        found[size] = {key: run["cumulative"] for key, run in runs.items() if key.startswith(f"{size}:")}
    grid.write({"cumulative": found}, "\n".join(tables))


def means_of(run: Record) -> list[tuple[int, float]]:
    """Each judged round of a run, and the mean score of its nodes.

    The nodes of a run depend on each other: they share a warm start, and in a swarm their answers. Runs do not.
    """
    rows: list[tuple[str, int, float]] = run["judged"]  # type: ignore[assignment]
    scores: dict[int, list[float]] = {}
    for _, round_, score in rows:
        scores.setdefault(round_, []).append(score)
    return [(round_, fmean(each)) for round_, each in scores.items()]


def table(points: Sequence[Point]) -> str:
    """A row per bin of rounds."""

    def row(point: Point) -> list[str]:
        test = point.test
        p, favours = ("-", "-") if test is None else (f"{test.p:.3f}", f"{test.favours:.2f}")
        q = "-" if point.q is None else f"{point.q:.3f}"
        return [str(point.round), str(point.swarm), str(point.solo), favours, p, q]

    head = ["rounds from", "swarm pass@1 (runs)", "solo pass@1 (runs)", "swarm ahead", "p", "q"]
    return markdown(head, map(row, points))


if __name__ == "__main__":
    main(sys.argv[1:])
