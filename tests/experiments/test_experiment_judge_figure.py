"""The shortened run of `make judge_figure`: the real judge on simulated time."""

import json
from pathlib import Path

from experiments.judge_figure.__main__ import main


def test_every_node_of_both_sizes_and_conditions_is_judged_in_each_round(tmp_path: Path) -> None:
    main(["--quick", "--results", str(tmp_path)])
    runs = {run["key"]: run for run in map(json.loads, (tmp_path / "runs.jsonl").read_text().split("\n"))}
    assert set(runs) == {f"{size}:{one}:0" for size in ("small", "large") for one in ("solo", "swarm")}
    for run in runs.values():
        expected = [[f"{node}", number] for number in range(3) for node in range(3)]
        assert [judged[:2] for judged in run["judged"]] == expected
    assert "## large" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "figure3-small.png").stat().st_size > 1000
