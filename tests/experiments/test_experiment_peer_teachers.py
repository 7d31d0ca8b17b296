"""Shortened runs of `make peer_teachers`: two tokenizers, in one process and as real nodes with a real server."""

import json
from pathlib import Path

from experiments.peer_teachers.__main__ import main


def test_nodes_of_two_tokenizers_train_in_step_and_their_logs_pass_the_audit(tmp_path: Path) -> None:
    main(["--quick", "--real", "--results", str(tmp_path)])
    (run,) = map(json.loads, (tmp_path / "real" / "runs.jsonl").read_text().split("\n"))
    assert run["key"] == "teach:0"
    assert run["audits_clean"] == len(run["curves"]) == 2
    assert [[one[0] for one in curve] for curve in run["curves"]] == [[0, 2], [0, 2]]


def test_the_same_nodes_in_one_process_write_a_table_and_curves(tmp_path: Path) -> None:
    main(["--quick", "--results", str(tmp_path)])
    (run,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().split("\n"))
    assert [[one[0] for one in curve] for curve in run["curves"]] == [[0, 2], [0, 2]]
    assert "| teach spell_backward | basic_arithmetic |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "curves.png").stat().st_size > 1000
