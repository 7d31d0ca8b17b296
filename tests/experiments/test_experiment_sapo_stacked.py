"""The shortened run of `make sapo_stacked`."""

import json
from pathlib import Path

from experiments.sapo_stacked.__main__ import main


def test_sapo_runs_and_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    main(["--quick", "--results", str(tmp_path)])
    lines = (tmp_path / "runs.jsonl").read_text().split()
    assert "| rarest 4/4 | 1 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "figure2.png").stat().st_size > 1000
    assert {cell["cell"]: cell["taken"] > 0 for cell in json.loads((tmp_path / "results.json").read_text())}[
        "8/0"
    ] is False
    main(["--quick", "--results", str(tmp_path)])
    assert (tmp_path / "runs.jsonl").read_text().split() == lines
