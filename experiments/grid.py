"""Runs the cells of an experiment one after the other; those whose result is on the disk are not run again."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = bool | int | float | str | list["Value"] | dict[str, "Value"] | None
Record: TypeAlias = dict[str, Value]

RUNS = "runs.jsonl"


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
