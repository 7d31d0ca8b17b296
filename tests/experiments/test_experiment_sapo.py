"""The shortened run of `make sapo`: real nodes, a real server."""

import json
from pathlib import Path

from experiments.sapo.__main__ import main


def test_real_nodes_train_on_each_other_and_their_logs_pass_the_audit(tmp_path: Path) -> None:
    main(["--quick", "--results", str(tmp_path)])
    runs = {run["key"]: run for run in map(json.loads, (tmp_path / "runs.jsonl").read_text().split("\n"))}
    assert {key: len(run["rewards"]) for key, run in runs.items()} == {"rarest:4/4:0": 2}
    assert {run["audits_clean"] for run in runs.values()} == {2}
    assert "| rarest 4/4 | 1 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "figure1.png").stat().st_size > 1000
