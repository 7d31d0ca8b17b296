"""Runs the cells of an experiment one after the other; those whose result is on the disk are not run again.

--only KEY   this cell alone
--quick      a shortened grid, for --results in a folder of its own
--results D  where the results are
"""

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

Value: TypeAlias = bool | int | float | str | list["Value"] | dict[str, "Value"] | None
Record: TypeAlias = dict[str, Value]

RUNS = "runs.jsonl"


@dataclass(frozen=True, slots=True)
class Grid:
    """An experiment as its command line asks for it; experiment.toml has the plan."""

    plan: dict[str, Any]
    quick: bool
    only: str | None
    results: Path

    @classmethod
    def asked(
        cls, arguments: list[str], folder: Path, quick: Mapping[str, Any] | None = None, *, threads: int | None = 1
    ) -> "Grid":
        """Reads the command line and the plan, in which `quick` takes the place of some entries if it is asked for."""
        parser = argparse.ArgumentParser(prog=f"python -m experiments.{folder.name}")
        parser.add_argument("--only")
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--results", type=Path, default=folder / "results")
        options = parser.parse_args(arguments)
        if threads is not None:
            torch.set_num_threads(threads)
        plan = tomllib.loads((folder / "experiment.toml").read_text()) | (quick or {} if options.quick else {})
        return cls(plan, options.quick, options.only, options.results)

    def completed(self, keys: list[str], measure: Callable[[str], Record]) -> list[Record]:
        """Runs what is missing, or the cell that is asked for. Returns all records, or none while one is missing."""
        complete(self.results, [self.only] if self.only else keys, measure)
        done = finished(self.results)
        return [done[key] for key in keys] if all(key in done for key in keys) else []

    def write(self, cells: object, tables: str) -> None:
        """Writes results.json and results.md."""
        (self.results / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
        (self.results / "results.md").write_text(tables)


def finished(folder: Path) -> dict[str, Record]:
    """The runs that have ended, by their key; a line that was cut off by a crash is not one."""
    file = folder / RUNS
    result: dict[str, Record] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        result[record["key"]] = record
    return result


def complete(folder: Path, keys: Iterable[str], measure: Callable[[str], Record]) -> list[Record]:
    """The record of every key, in order; `measure` gives those that are missing, and each is written at once."""
    folder.mkdir(parents=True, exist_ok=True)
    keys, done = list(keys), finished(folder)
    for number, key in enumerate(keys, 1):
        if key in done:
            continue
        began_s = time.monotonic()
        done[key] = {"key": key, **measure(key), "seconds": round(time.monotonic() - began_s, 1)}
        with (folder / RUNS).open("a") as file:
            # A line break first: the file may end in a line that was cut off.
            file.write(("\n" if file.tell() else "") + json.dumps(done[key]))
        sys.stderr.write(f"{number} of {len(keys)}: {key}, {done[key]['seconds']} s\n")
    return [done[key] for key in keys]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right."""
    head = list(head)
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
