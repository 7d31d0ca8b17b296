"""experiments/tito, shortened, by the command that runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_gateway_misaligns_nothing_where_text_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.tito", "--quick", "--results", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=250)
    rows = {(row["boundary"], row["path"]): row for row in json.loads((tmp_path / "results.json").read_text())}
    for boundary in ("plain", "marked"):
        assert rows[boundary, "gateway"]["misaligned"] == 0
        assert rows[boundary, "gateway"]["log_ratio"] < 1e-5
        assert rows[boundary, "text"]["misaligned"] > 0
        assert rows[boundary, "text"]["log_ratio"] > 1e-2
    assert (tmp_path / "reward.png").is_file()
    assert "misaligned" in (tmp_path / "results.md").read_text()
