"""`python -m experiments.areal_staleness`: runs what is missing, then writes the tables and the plot.

--only KEY   this run alone, such as 16/decoupled/0 (eta, objective, seed) or slow/16/decoupled/0 (in a regime)
--quick      a shortened grid, for --results in a folder of its own
--results D  where the results are
"""

import argparse
import itertools
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.areal_staleness.driver import Driver
from experiments.areal_staleness.tables import write_results
from experiments.grid import Record, complete, finished
from shoal.config import parse
from shoal.run.prepare import prepare

HERE = Path(__file__).parent
GRID = "grid"
QUICK = ("train.steps=2", "train.groups_per_step=2", "train.minibatches=2", "eval.questions=8")


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    parser = argparse.ArgumentParser(prog="experiments.areal_staleness")
    parser.add_argument("--only")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = tomllib.loads((HERE / "experiment.toml").read_text())
    if options.quick:
        plan |= {"etas": ["1", "inf"], "seeds": [0], "regimes": {}}
    losses = plan["objectives"] | plan["variants"]
    keys = [*cells(plan["etas"], plan["objectives"], plan["seeds"])]
    for name, regime in plan["regimes"].items():
        keys += [f"{name}/{key}" for key in cells(regime["etas"], regime["objectives"], regime["seeds"])]

    def measure(key: str) -> Record:
        *regime, eta, objective, seed = key.split("/")
        settings = [*(QUICK if options.quick else ()), f"seed={seed}"]
        for name in regime:
            settings += plan["regimes"][name]["settings"]
        run = {**plan["run"], "train": {**plan["run"]["train"], "loss": losses[objective]}}
        config = parse(run, settings)
        with prepare(config) as prepared:
            course = Driver(config, prepared, float(eta)).course()
        where = {"regime": regime[0] if regime else GRID, "eta": eta, "objective": objective, "seed": int(seed)}
        return {**where, **asdict(course)}

    complete(options.results, [options.only] if options.only else keys, measure)
    done = finished(options.results)
    if all(key in done for key in keys):
        write_results(options.results, [done[key] for key in keys])


def cells(etas: list[str], objectives: list[str], seeds: list[int]) -> list[str]:
    """The keys of every combination."""
    return [f"{eta}/{objective}/{seed}" for seed, eta, objective in itertools.product(seeds, etas, objectives)]


if __name__ == "__main__":
    main(sys.argv[1:])
