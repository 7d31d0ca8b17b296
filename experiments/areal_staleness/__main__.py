"""`python -m experiments.areal_staleness`: runs what is missing, then writes the tables and the plot.

--only KEY   this run alone, such as 16/decoupled/0 (eta, objective, seed) or slow/16/decoupled/0 (in a regime)
--quick      a shortened grid, for --results in a folder of its own
--results D  where the results are
"""

import itertools
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.areal_staleness.driver import Driver
from experiments.areal_staleness.tables import write_results
from experiments.grid import Grid, Record
from shoal.config import parse
from shoal.run.prepare import prepare

HERE = Path(__file__).parent
GRID = "grid"
QUICK = ("train.steps=2", "train.groups_per_step=2", "train.minibatches=2", "eval.questions=8")


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, {"etas": ["1", "inf"], "seeds": [0], "regimes": {}})
    plan = grid.plan
    losses = plan["objectives"] | plan["variants"]
    keys = [*cells(plan["etas"], plan["objectives"], plan["seeds"])]
    for name, regime in plan["regimes"].items():
        keys += [f"{name}/{key}" for key in cells(regime["etas"], regime["objectives"], regime["seeds"])]

    def measure(key: str) -> Record:
        *regime, eta, objective, seed = key.split("/")
        settings = [*(QUICK if grid.quick else ()), f"seed={seed}"]
        run = plan["run"]
        for name in regime:
            settings += plan["regimes"][name]["settings"]
            if other := plan["regimes"][name].get("run"):
                run = plan["runs"][other]
        run = {**run, "train": {**run["train"], "loss": losses[objective]}}
        config = parse(run, settings)
        with prepare(config) as prepared:
            course = Driver(config, prepared, float(eta)).course()
        where = {"regime": regime[0] if regime else GRID, "eta": eta, "objective": objective, "seed": int(seed)}
        return {**where, **asdict(course)}

    if runs := grid.completed(keys, measure):
        write_results(grid.results, runs)


def cells(etas: list[str], objectives: list[str], seeds: list[int]) -> list[str]:
    """The keys of every combination."""
    return [f"{eta}/{objective}/{seed}" for seed, eta, objective in itertools.product(seeds, etas, objectives)]


if __name__ == "__main__":
    main(sys.argv[1:])
