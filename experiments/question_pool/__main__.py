"""`python -m experiments.question_pool [--quick] [--only KEY] [--results D]`.

A key is regime/arm/seed for an embedded model, and the regime alone where all its runs are stacked.
"""

import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from experiments.grid import Grid, Record, markdown
from experiments.question_pool.driver import course
from experiments.question_pool.stacked import stacked

HERE = Path(__file__).parent
ARMS = ("uniform", "pool")
QUICK = {"steps": 2, "every_steps": 1, "training": 12, "held_out": 4, "groups": 2, "warm_steps": 2}
Curve: TypeAlias = list[tuple[float, float]]
"""Rollouts and held-out accuracy."""


def main(arguments: list[str]) -> None:
    """Runs what is missing, then writes the table and the plot."""
    grid = Grid.asked(arguments, HERE, {"seeds": [0, 1], "resamples": 100})
    regimes = grid.plan["regimes"]
    if grid.quick:
        regimes = {name: {**regime, **QUICK} for name, regime in regimes.items() if name in ("demo", "gcd")}
    seeds = {name: regime.get("seeds", grid.plan["seeds"]) for name, regime in regimes.items()}
    keys = sorted(
        (key for name, regime in regimes.items() for key in keys_of(name, regime, seeds[name])),
        key=lambda key: int(key.rpartition("/")[2]) if "/" in key else len(grid.plan["seeds"]),
    )

    def measure(key: str) -> Record:
        name, *cell = key.split("/")
        if not cell:
            return {"regime": name, "runs": stacked(regimes[name], seeds[name], ARMS)}
        return {"regime": name, "runs": [course(regimes[name], cell[0], int(cell[1]))]}

    if done := grid.completed(keys, measure):
        runs = {name: [run for one in done if one["regime"] == name for run in one["runs"]] for name in regimes}
        cells = [summary(name, runs[name], grid.plan["resamples"]) for name in regimes]
        grid.write(cells, table(cells))
        draw(grid.results / "question_pool.png", runs)


def keys_of(name: str, regime: Mapping[str, object], seeds: Sequence[int]) -> list[str]:
    """The keys of a regime."""
    return [f"{name}/{arm}/{seed}" for seed, arm in itertools.product(seeds, ARMS)] if "model" in regime else [name]


def mean_curve(runs: Sequence[Record]) -> Curve:
    """The best mean accuracy over the runs so far, by rollouts: the crossing of a level is then unique."""
    curve, best = Curve(), 0.0
    for points in zip(*(run["accuracies"] for run in runs), strict=True):
        best = max(best, fmean(accuracy for _, accuracy in points))
        curve.append((points[0][0], best))
    return curve


def reached(curve: Curve, level: float) -> float:
    """Rollouts after which a curve first has a level, linear between its points."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= level:
            return before if low >= level else before + (after - before) * (level - low) / (high - low)
    return curve[-1][0]


def saved(uniform: Sequence[Record], pool: Sequence[Record]) -> float:
    """Rollouts of uniform choice over the pool's, to the highest accuracy that both reach."""
    one, other = mean_curve(uniform), mean_curve(pool)
    level = min(one[-1][1], other[-1][1])
    return max(reached(one, level), 1.0) / max(reached(other, level), 1.0)


def summary(regime: str, runs: Sequence[Record], resamples: int) -> Record:
    """A regime's figures; the interval resamples the seeds, whose two runs stay together."""
    uniform, pool = ([run for run in runs if run["arm"] == arm] for arm in ARMS)
    dice = random.Random(0)
    drawn = sorted(
        saved([uniform[i] for i in chosen], [pool[i] for i in chosen])
        for chosen in (dice.choices(range(len(uniform)), k=len(uniform)) for _ in range(resamples))
    )
    one, other = mean_curve(uniform), mean_curve(pool)
    return {
        "regime": regime,
        "seeds": len(uniform),
        "rollouts": one[-1][0],
        "level": round(min(one[-1][1], other[-1][1]), 4),
        "ratio": round(saved(uniform, pool), 3),
        "low": round(drawn[int(0.025 * resamples)], 3),
        "high": round(drawn[int(0.975 * resamples)], 3),
        "before": round(one[0][1], 4),
        "uniform": round(one[-1][1], 4),
        "pool": round(other[-1][1], 4),
        "informative_uniform": round(fmean(fmean(run["informative"]) for run in uniform), 4),
        "informative_pool": round(fmean(fmean(run["informative"]) for run in pool), 4),
    }


def table(cells: Sequence[Record]) -> str:
    """By regime."""
    rows = [
        [
            str(cell["regime"]),
            f"{cell['seeds']}",
            f"{cell['before']:.3f}",
            f"{cell['uniform']:.3f}",
            f"{cell['pool']:.3f}",
            f"{cell['informative_uniform']:.2f}",
            f"{cell['informative_pool']:.2f}",
            f"{cell['informative_pool'] / max(cell['informative_uniform'], 1e-9):.2f}",
            f"{cell['ratio']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})",
        ]
        for cell in cells
    ]
    head = [
        "regime",
        "seeds",
        "accuracy before",
        "after, uniform",
        "after, pool",
        "informative groups, uniform",
        "pool",
    ]
    return markdown([*head, "times as many", "rollouts saved (95 %)"], rows)


def draw(path: Path, runs: Mapping[str, Sequence[Record]]) -> None:
    """Held-out accuracy by rollouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(runs), 3.2), layout="constrained")
    for axes, (regime, found) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for arm in ARMS:
            axes.plot(*zip(*mean_curve([run for run in found if run["arm"] == arm]), strict=True), label=arm)
        axes.set_title(regime)
        axes.set_xlabel("rollouts")
    figure.axes[0].set_ylabel("held-out accuracy, best so far")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1:])
