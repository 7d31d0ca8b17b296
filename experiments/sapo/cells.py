"""Cells of nodes, run one after the other: one that fails leaves its logs, and the next one runs."""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.grid import Record, complete, finished
from experiments.sapo.controls import beside_controls, processor_table
from experiments.sapo_stacked.picture import draw
from experiments.sapo_stacked.verdict import comparisons, summary, table
from shoal.errors import ShoalError


@dataclass(frozen=True, slots=True)
class Cells:
    """What the command line asks for."""

    only: str | None
    most: int | None
    """How many of the missing cells run now; None is all."""
    quick: bool
    results: Path

    @classmethod
    def asked(cls, arguments: Sequence[str], folder: Path) -> "Cells":
        """Reads `[--quick] [--only KEY] [--cells N] [--results D]` of an experiment; torch has one thread here."""
        parser = argparse.ArgumentParser(prog=f"python -m experiments.{folder.name}")
        parser.add_argument("--only")
        parser.add_argument("--cells", type=int, help="how many of the missing cells to run now")
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--results", type=Path, default=folder / "results")
        options = parser.parse_args(arguments)
        torch.set_num_threads(1)
        return cls(options.only, options.cells, options.quick, options.results)

    def run(self, planned: Sequence[str], measure: Callable[[str, Path], Record]) -> list[str]:
        """Runs what is missing, each cell in a folder that is removed afterwards. Returns the keys that failed."""
        failed = list[str]()

        def measured(key: str) -> Record:
            with tempfile.TemporaryDirectory(prefix="shoal-cell-") as made:
                try:
                    return measure(key, Path(made))
                except* ShoalError:
                    keep_logs(Path(made), self.results / "failed" / key.replace("/", "-").replace(":", "-"))
                    raise

        missing = [key for key in planned if key not in finished(self.results)]
        for key in [self.only] if self.only else missing[: self.most]:
            try:
                complete(self.results, [key], measured)
            except* ShoalError as errors:
                failed.append(key)
                sys.stderr.write(f"{key} failed: {'; '.join(map(str, errors.exceptions))}\n")
        return failed

    def write(self, planned: Sequence[str], beside: Sequence[tuple[str, str]], *more: str) -> dict[str, Record]:
        """Writes tables and figures of the planned runs that are there, and returns them; `more` are further tables."""
        self.results.mkdir(parents=True, exist_ok=True)
        runs = self.found(planned)
        cells = summary(runs)
        (self.results / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
        tables = [table(cells), comparisons(runs), beside_controls(runs, list(beside)), processor_table(runs), *more]
        (self.results / "results.md").write_text("\n".join(tables))
        if runs:
            draw(self.results, runs)
        return runs

    def found(self, planned: Sequence[str]) -> dict[str, Record]:
        """The planned runs that have ended."""
        found = finished(self.results)
        return {key: found[key] for key in planned if key in found}

    def end(self, failed: Sequence[str]) -> None:
        """Ends the process with an error if a cell has failed."""
        if failed:
            sys.exit(f"failed: {', '.join(failed)}; logs are in {self.results / 'failed'}")


def keep_logs(folder: Path, kept: Path) -> None:
    """Copies what the nodes of a cell printed and logged."""
    for file in [*folder.glob("*.log"), *folder.glob("*/logs/*"), *folder.glob("*/metrics.jsonl")]:
        target = kept / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def keys_of(names: Mapping[str, object], cells: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Name, cell and seed: all cells of each seed."""
    return [f"{name}:{cell}:{seed}" for seed in seeds for name in names for cell in cells]
