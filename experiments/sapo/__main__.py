"""`python -m experiments.sapo [--quick] [--only KEY] [--cells N] [--results D]`: real nodes; see claim.md."""

import asyncio
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

from experiments.grid import Record
from experiments.sapo.cells import Cells, keys_of
from experiments.sapo.controls import draw_controls
from experiments.sapo.node import Scale, run_cell
from experiments.sapo.warm import warm_model

HERE = Path(__file__).parent
QUICK = Scale(nodes=2, rounds=2, each=4, questions=9, warm_steps=2, width=32)


def main(arguments: list[str]) -> None:
    """Runs the experiment, or what is left of it."""
    cells = Cells.asked(arguments, HERE)
    plan, scale = tomllib.loads((HERE / "experiment.toml").read_text()), QUICK if cells.quick else Scale()
    regimes, seeds = plan["regimes"], plan["seeds"]
    planned = [*keys_of(regimes, plan["cells"], seeds), *keys_of(regimes, plan["controls"], seeds)]
    if cells.quick:
        planned = keys_of(regimes, ["4/4"], [0])
    with tempfile.TemporaryDirectory(prefix="shoal-sapo-") as made:

        @cache
        def warm(regime: str, seed: int) -> Path:
            return warm_model(Path(made) / f"{regime}-{seed}", regimes[regime], seed, scale)

        def measure(key: str, folder: Path) -> Record:
            regime, cell, seed = key.rsplit(":", 2)
            return asyncio.run(run_cell(folder, warm(regime, int(seed)), cell, int(seed), scale))

        failed = cells.run(planned, measure)
    runs = cells.write(planned, plan["beside"])
    if runs:
        draw_controls(cells.results / "controls.png", runs)
    cells.end(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
