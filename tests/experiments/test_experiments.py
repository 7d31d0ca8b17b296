"""Each experiment, shortened, by the command that runs it; and that an interrupted one goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def experiment(name: str, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", "--quick", "--results", str(results), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "runs", "heading"),
    [
        ("areal_staleness", 6, "| eta | naive | decoupled | double_sided | AReaL naive | AReaL decoupled |"),
        ("async_speedup", 2, "AReaL's throughput"),
        ("interrupt", 2, "over drain"),
        ("question_pool", 5, "rollouts saved"),
    ],
)
def test_an_experiment_writes_its_runs_a_table_and_a_plot(tmp_path: Path, name: str, runs: int, heading: str) -> None:
    completed(name, tmp_path, runs, heading)


def test_an_interrupted_experiment_runs_only_what_is_missing(tmp_path: Path) -> None:
    finished = (ROOT / "experiments" / "packing" / "results" / "runs.jsonl").read_text().splitlines()[0]
    first = json.loads(finished) | {"key": "0", "sigma": 0.0, "marked": True}
    (tmp_path / "runs.jsonl").write_text(json.dumps(first) + '\n{"key": "1", "sig')  # cut off by a crash
    completed("packing", tmp_path, 3, "useful, packed")
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == first
    assert json.loads(lines[-1])["key"] == "1"


def completed(name: str, results: Path, runs: int, heading: str) -> None:
    """Runs an experiment, which leaves so many runs, a table, a plot, and has a claim."""
    done = experiment(name, results)
    assert done.returncode == 0, done.stderr
    assert len((results / "runs.jsonl").read_text().splitlines()) == runs
    assert heading in (results / "results.md").read_text()
    assert json.loads((results / "results.json").read_text())
    assert (results / f"{name}.png").stat().st_size > 1000
    claim = (ROOT / "experiments" / name / "claim.md").read_text()
    assert "## Claim" in claim
    assert "## Found" in claim
