"""`shoal compare` with real engines."""

import json
from pathlib import Path

from command import shoal
from shoal.config import to_toml
from shoal.library.calls import config_of
from shoal.run.demo_model.warm_start import DEMO_TASK, demo_model


def test_a_run_is_compared_with_the_model_it_began_with(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "resolved.toml").write_text(to_toml(config_of("demo", DEMO_TASK, run_dir=str(run), max_tokens=12)))
    (run / "metrics.jsonl").touch()
    (run / "model").symlink_to(demo_model()[0])  # nothing was learned
    done = shoal(
        "compare", "mine@start", "mine", "--questions=32", "--json", "--rollout.temperature=1e-5", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sampled"]["first"] == found["sampled"]["second"] == found["greedy"]["first"] > 0.3
    assert found["sampled"]["questions"] == 32
    assert found["sampled"]["low"] < 0 < found["sampled"]["high"]
    assert found["verdict"].startswith("runs/mine: not surely better or worse than runs/mine@start")
    assert "32 of 32 questions" in done.stderr


def test_two_models_without_tasks_are_refused(tmp_path: Path) -> None:
    done = shoal("compare", "demo", "demo", cwd=tmp_path)
    assert done.returncode == 2
    assert "demo and demo: expected a run among them, or --config with the tasks to ask" in done.stderr
