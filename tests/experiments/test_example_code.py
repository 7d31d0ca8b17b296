"""The example that learns from unit tests, shortened."""

import json
import subprocess
import sys
from pathlib import Path

from shoal.experience.audit import audit

ROOT = Path(__file__).parents[2]


def test_a_few_steps_of_the_code_example_make_held_out_programs_pass_more_often(tmp_path: Path) -> None:
    """24 of the 300 steps."""
    settings = [f"--run_dir={tmp_path / 'run'}", "--train.steps=24", "--eval.every_steps=24"]
    command = [sys.executable, "-m", "shoal.cli", "train", "examples/code/config.toml", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (record["sampled"] for record in records if record["kind"] == "eval")
    assert after > before
    last = [record for record in records if record["kind"] == "step"][-1]
    assert last["scorer_failed"] == last["scorer_timed_out"] == 0
    assert last["scorer_sandboxes"] > 0
    assert audit(tmp_path / "run").ok
