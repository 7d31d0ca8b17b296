"""`python -m experiments.rehearsal [--seeds N] [--results D]`: all proofs, and one JSON line of them."""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.processes import commit
from experiments.rehearsal.closed_form import closed_forms
from experiments.rehearsal.own_runs import own_runs
from experiments.rehearsal.published import areal, step_times
from experiments.rehearsal.splits import splits

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = "faults.jsonl"
PARTS: Mapping[str, Callable[[], Sequence[Mapping[str, object]]]] = {
    "closed_form": closed_forms,
    "own_runs": own_runs,
    "areal": areal,
    "step_times": step_times,
    "splits": splits,
}


def main(arguments: list[str]) -> None:
    """Runs the parts that have no results yet, or those named, and prints the figures."""
    parser = argparse.ArgumentParser(prog="experiments.rehearsal")
    parser.add_argument("--seeds", type=int, default=0, help="further seeds of faults")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    options.results.mkdir(exist_ok=True)
    for name in options.only or PARTS:
        began_s = time.process_time()
        rows = PARTS[name]()
        _write(options.results / f"{name}.json", {**_where(began_s), "rows": rows})
    if options.seeds:
        with (options.results / FAULTS).open("a") as file:
            print(json.dumps(_where(time.process_time())), file=file, flush=True)
            first = sum(row["fault_seeds"] for row in _faults(options.results))
            script = [sys.executable, "tests/support/rehearsal_seeds.py", str(first), str(options.seeds)]
            subprocess.run(script, cwd=ROOT, check=True, stdout=file)
    print(json.dumps(figures(options.results)))


def figures(results: Path) -> dict[str, object]:
    """The figures of the files of results."""
    found = {name: json.loads((results / f"{name}.json").read_text())["rows"] for name in PARTS}
    faults = _faults(results)
    real = json.loads((HERE.parent / "rehearsed_runs" / "results" / "results.json").read_text())[0]
    newest = real[max(real)]
    return {
        "configs": newest["configs"],
        "median_error": newest["median_error"],
        "own_staleness_error": newest["median_staleness_error"],
        "intervals_hold": newest["within"],
        "areal": [row["rehearsed"] for row in found["areal"]],
        "areal_errors": [row["error"] for row in found["areal"]],
        "staleness_error": round(median(abs(row["error"]) for row in found["closed_form"]), 4),
        "step_times": len(found["step_times"]),
        "step_time_error": round(median(abs(row["error"]) for row in found["step_times"]), 3),
        "split_over_best": min(row["picked_over_best"] for row in found["splits"]),
        "fault_seeds": sum(row["fault_seeds"] for row in faults),
        "violations": sum(row[kind] for row in faults for kind in ("lost", "doubled", "stale", "standstills")),
    }


def _faults(results: Path) -> list[Mapping[str, int]]:
    """Sums of a thousand seeds each; the other lines say where they ran."""
    file = results / FAULTS
    rows = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
    return [row for row in rows if "fault_seeds" in row]


def _where(began_s: float) -> dict[str, object]:
    return {
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def _write(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
