"""Any process of a run may be killed at any moment. tests/product/ has a run that is killed as a whole."""

import json
from pathlib import Path

from shoal.experience.audit import audit
from train_runs import children, events, start, wait_for_steps


def test_a_killed_engine_is_started_again_and_the_run_loses_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = start(tmp_path, tiny_model_dir, "--train.steps=30", "--json")
    wait_for_steps(tmp_path / "run", 5, run)
    (engine,) = children(run, "shoal.engine.server.http_server")
    engine.kill()
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 30
    assert events(tmp_path / "run").count("engine_lost") == 1
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["failed"] for step in steps if step["kind"] == "step") == 0


def test_a_killed_trainer_ends_the_run_with_a_sentence_and_a_whole_log(tmp_path: Path, tiny_model_dir: Path) -> None:
    first = start(tmp_path, tiny_model_dir)
    wait_for_steps(tmp_path / "run", 3, first)
    (victim,) = children(first, "shoal.trainer.worker")
    victim.kill()
    _, err = first.communicate(timeout=200)
    assert first.returncode == 2
    assert "the trainer process ended with signal 9" in err
    assert "--resume" in err
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
