"""`python -m experiments.peer_teachers [--real] [--quick] [--only KEY] [--cells N] [--steps N] [--results D]`."""

import argparse
import asyncio
import shutil
import sys
import tempfile
import tomllib
from functools import cache
from itertools import product
from pathlib import Path

import torch

from experiments.grid import Record, complete, finished
from experiments.peer_teachers.nodes import Condition, run_nodes, specialist_model
from experiments.peer_teachers.picture import draw, table
from experiments.peer_teachers.together import run_together
from experiments.sapo.node import Scale

HERE = Path(__file__).parent
QUICK = Scale(nodes=2, rounds=2, each=4, questions=4, warm_steps=2, width=32)


def main(arguments: list[str]) -> None:
    """Runs the experiment, or what is left of it."""
    parser = argparse.ArgumentParser(prog="experiments.peer_teachers")
    parser.add_argument("--only")
    parser.add_argument("--cells", type=int, help="how many of the missing cells to run now")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true", help="`shoal train` processes, and results in a folder beside")
    parser.add_argument("--steps", type=int, help="in place of those of the plan")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    run = run_nodes if options.real else run_together
    if options.real:
        options.results /= "real"
    torch.set_num_threads(1)
    plan = tomllib.loads((HERE / "experiment.toml").read_text())
    steps, every = options.steps or plan["steps"], plan["every_steps"]
    full = Scale(3, steps, plan["each"], lr=plan["lr"], questions=plan["questions"], every=every)
    scale = QUICK if options.quick else full
    families = list(plan["families"])[: scale.nodes]
    with tempfile.TemporaryDirectory(prefix="shoal-teachers-") as made:

        @cache
        def specialist(family: str, seed: int) -> Path:
            return specialist_model(Path(made) / f"{family}-{seed}", family, plan["families"][family], seed, scale)

        def measure(key: str) -> Record:
            condition, seed = key.split(":")
            models = {family: specialist(family, int(seed)) for family in families}
            folder = Path(made) / key.replace(":", "-")
            folder.mkdir()
            try:
                return asyncio.run(run(folder, models, Condition(**plan["conditions"][condition]), int(seed), scale))
            finally:
                shutil.rmtree(folder)

        planned = [f"{one}:{seed}" for seed, one in product(plan["seeds"], plan["conditions"])]
        planned = ["teach:0"] if options.quick else planned
        missing = [key for key in planned if key not in finished(options.results)]
        complete(options.results, [options.only] if options.only else missing[: options.cells], measure)
    runs = {key: record for key, record in finished(options.results).items() if key in planned}
    (options.results / "results.md").write_text(table(runs, families))
    draw(options.results / "curves.png", runs, families)


if __name__ == "__main__":
    main(sys.argv[1:])
