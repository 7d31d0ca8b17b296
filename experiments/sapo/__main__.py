"""`python -m experiments.sapo [--quick] [--only KEY] [--cells N] [--results D]`: real nodes; see claim.md."""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

import torch

from experiments.grid import Record, complete, finished
from experiments.sapo.node import Scale, run_cell
from experiments.sapo.warm import warm_model
from experiments.sapo_stacked.picture import draw
from experiments.sapo_stacked.verdict import comparisons, summary, table

HERE = Path(__file__).parent
QUICK = Scale(nodes=2, rounds=2, each=4, questions=9, warm_steps=2, width=32)


def main(arguments: list[str]) -> None:
    """Runs the experiment, or what is left of it."""
    parser = argparse.ArgumentParser(prog="experiments.sapo")
    parser.add_argument("--only")
    parser.add_argument("--cells", type=int, help="how many of the missing cells to run now")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan, scale = tomllib.loads((HERE / "experiment.toml").read_text()), QUICK if options.quick else Scale()
    with tempfile.TemporaryDirectory(prefix="shoal-sapo-") as made:

        @cache
        def warm(regime: str) -> Path:
            return warm_model(Path(made) / regime, plan["regimes"][regime], scale)

        def measure(key: str) -> Record:
            regime, cell, seed = key.rsplit(":", 2)
            folder = Path(made) / key.replace("/", "-").replace(":", "-")
            folder.mkdir(parents=True)
            record = asyncio.run(run_cell(folder, warm(regime), cell, int(seed), scale))
            shutil.rmtree(folder)
            return record

        planned = keys_of(plan, quick=options.quick)
        missing = [key for key in planned if key not in finished(options.results)]
        complete(options.results, [options.only] if options.only else missing[: options.cells], measure)
    found = finished(options.results)
    runs = {key: found[key] for key in planned if key in found}
    cells = summary(runs)
    (options.results / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
    (options.results / "results.md").write_text(table(cells) + "\n" + comparisons(runs))
    draw(options.results, runs)


def keys_of(plan: Record, *, quick: bool) -> list[str]:
    """Regime, cell and seed; a seed's cells of the paper, then its controls, then the next seed."""
    regimes, cells, controls = plan["regimes"], plan["cells"], plan["controls"]
    assert isinstance(regimes, dict)
    assert isinstance(cells, list)
    assert isinstance(controls, list)
    if quick:
        return [f"{next(iter(regimes))}:{cell}:0" for cell in ("4/4",)]
    assert isinstance(plan["seeds"], list)
    return [f"{regime}:{cell}:{seed}" for seed in plan["seeds"] for regime in regimes for cell in (*cells, *controls)]


if __name__ == "__main__":
    main(sys.argv[1:])
