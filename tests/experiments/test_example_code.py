"""The example that learns from unit tests, shortened."""

import json
import subprocess
import sys
from pathlib import Path

from shoal.experience.audit import audit

ROOT = Path(__file__).parents[2]


def test_a_few_steps_of_the_code_example_run_programs_in_the_sandbox_and_lose_none(tmp_path: Path) -> None:
    """4 of the 300 steps, which show no learning."""
    settings = [f"--run_dir={tmp_path / 'run'}", "--train.steps=4", "--eval.every_steps=4", "--eval.questions=32"]
    command = [sys.executable, "-m", "shoal.cli", "train", "examples/code/config.toml", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (record for record in records if record["kind"] == "eval")
    assert 0 < before["sampled"] < before["greedy"] < 1, "the warm start knows the task, and not well"
    assert (before["unscored"], after["unscored"]) == (0, 0)
    last = [record for record in records if record["kind"] == "step"][-1]
    assert last["scorer_failed"] == last["scorer_timed_out"] == 0
    assert last["scorer_sandboxes"] > 0
    assert audit(tmp_path / "run").ok
