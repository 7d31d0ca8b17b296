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
from experiments.sapo.controls import beside_controls, draw_controls, processor_table
from experiments.sapo.node import Scale, run_cell
from experiments.sapo.warm import warm_model
from experiments.sapo_stacked.picture import draw
from experiments.sapo_stacked.verdict import comparisons, summary, table
from shoal.errors import ShoalError

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
        def warm(regime: str, seed: int) -> Path:
            return warm_model(Path(made) / f"{regime}-{seed}", plan["regimes"][regime], seed, scale)

        def measure(key: str) -> Record:
            regime, cell, seed = key.rsplit(":", 2)
            folder = Path(made) / key.replace("/", "-").replace(":", "-")
            folder.mkdir(parents=True)
            try:
                return asyncio.run(run_cell(folder, warm(regime, int(seed)), cell, int(seed), scale))
            except* ShoalError:
                keep_logs(folder, options.results / "failed" / folder.name)
                raise
            finally:
                shutil.rmtree(folder)

        planned = keys_of(plan, quick=options.quick)
        missing = [key for key in planned if key not in finished(options.results)]
        failed = list[str]()
        for key in [options.only] if options.only else missing[: options.cells]:
            try:
                complete(options.results, [key], measure)
            except* ShoalError as errors:
                failed.append(key)
                sys.stderr.write(f"{key} failed: {'; '.join(map(str, errors.exceptions))}\n")
    found = finished(options.results)
    runs = {key: found[key] for key in planned if key in found}
    cells = summary(runs)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
    beside = beside_controls(runs, [(cell, control) for cell, control in plan["beside"]])
    tables = [table(cells), comparisons(runs), beside, processor_table(runs)]
    (options.results / "results.md").write_text("\n".join(tables))
    if runs:
        draw(options.results, runs)
        draw_controls(options.results / "controls.png", runs)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; logs are in {options.results / 'failed'}")


def keep_logs(folder: Path, kept: Path) -> None:
    """Copies what the nodes of a cell printed and logged."""
    for file in [*folder.glob("*.log"), *folder.glob("*/logs/*"), *folder.glob("*/metrics.jsonl")]:
        target = kept / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def keys_of(plan: Record, *, quick: bool) -> list[str]:
    """Regime, cell and seed: the paper's cells of each seed, then the controls."""
    regimes, cells, controls = plan["regimes"], plan["cells"], plan["controls"]
    assert isinstance(regimes, dict)
    assert isinstance(cells, list)
    assert isinstance(controls, list)
    if quick:
        return [f"{next(iter(regimes))}:{cell}:0" for cell in ("4/4",)]
    assert isinstance(plan["seeds"], list)
    return [
        f"{regime}:{cell}:{seed}"
        for same in (cells, controls)
        for seed in plan["seeds"]
        for regime in regimes
        for cell in same
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
