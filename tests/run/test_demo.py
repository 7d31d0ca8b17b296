"""The demo as a newcomer runs it: from nothing to a better model."""

import json
import re
from pathlib import Path

import pytest

from command import shoal
from shoal.experience.audit import audit

FIGURES = {
    *("accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "reward_first", "reward_last", "wall_s"),
    *("warm_start_s", "steps", "samples_per_s", "staleness_max", "run_dir", "improvement"),
}


def test_the_demo_makes_its_model_once_and_a_few_steps_make_it_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A shortened run: 40 of the 400 steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = shoal("demo", "--json", "--run-dir", "run", "--train.steps=40", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= FIGURES
    assert figures["warm_start_s"] > 0
    assert figures["accuracy_after"] > figures["accuracy_before"]
    assert figures["greedy_before"] > 0.3, "the warm start knows the task"
    assert "making the small model (once): step 600 of 600, loss" in capfd.readouterr().err
    shown = done.stdout.partition("sampled answers before and after training:")[2].splitlines()[1:10]
    assert [line.split()[0] for line in shown] == ["'reverse", "before", "after"] * 3
    assert all(re.search(r"  reward [01]$", line) for line in shown if "reverse" not in line)
    assert (tmp_path / "run" / "report.png").stat().st_size > 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert audit(tmp_path / "run").ok
    assert "than the start" in figures["improvement"]
    (made,) = (tmp_path / "cache" / "shoal").iterdir()
    assert (made / "model.safetensors").is_file()
