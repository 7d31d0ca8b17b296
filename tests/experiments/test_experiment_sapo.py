"""The figures of `make sapo` come from the runs that are there, and a cell that fails ends nothing but itself."""

import json
import shutil
from pathlib import Path

import pytest

from experiments.sapo.__main__ import HERE, main


def test_tables_and_figures_come_from_runs_whose_logs_all_passed_the_audit(tmp_path: Path) -> None:
    shutil.copyfile(HERE / "results" / "runs.jsonl", tmp_path / "runs.jsonl")
    main(["--cells", "0", "--results", str(tmp_path)])
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert {run["audits_clean"] for run in runs} == {8}
    assert {len(run["rewards"]) for run in runs} == {40}
    table = (tmp_path / "results.md").read_text()
    assert all(f"| {cell} |" in table for cell in {run["key"].rpartition(":")[0].replace(":", " ") for run in runs})
    assert (tmp_path / "figure1.png").stat().st_size > 1000


def test_a_cell_that_fails_is_named_and_is_in_no_table(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"failed: rarest:0/1:0"):
        main(["--quick", "--only", "rarest:0/1:0", "--results", str(tmp_path)])
    assert ":0/1" not in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "runs.jsonl").exists()
