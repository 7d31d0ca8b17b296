"""A stopped process of a real run: what it holds up is said, and the run goes on or ends with a sentence."""

import json
import signal
from pathlib import Path

from shoal.experience.audit import audit
from shoal.run.standstill import FRUITLESS
from train_runs import children, events, start, wait_for_steps


def standstills(run: Path) -> list[str]:
    """What was said of each."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["reason"] for record in records if record.get("name") == "standstill"]


def test_a_stopped_engine_is_started_again_and_the_run_loses_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = start(tmp_path, tiny_model_dir, "--stall_s=5", "--train.steps=12", "--json")
    wait_for_steps(tmp_path / "run", 3, run)
    (engine,) = children(run, "shoal.engine.server.http_server")
    engine.send_signal(signal.SIGSTOP)
    out, err = run.communicate(timeout=400)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 12
    assert "engine_lost" in events(tmp_path / "run")
    helped = [one for one in standstills(tmp_path / "run") if "engine does not answer and is started again" in one]
    assert helped
    assert all("waits in" in one and "is starting" not in one for one in helped)
    assert audit(tmp_path / "run").ok


def test_a_stopped_trainer_ends_the_run_with_a_sentence(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = start(tmp_path, tiny_model_dir, "--stall_s=2")
    wait_for_steps(tmp_path / "run", 3, run)
    (trainer,) = children(run, "shoal.trainer.worker")
    trainer.send_signal(signal.SIGSTOP)
    _, err = run.communicate(timeout=200)
    assert run.returncode == 2
    assert "nothing has moved for" in err
    assert err.endswith("; go on with: shoal train run/resolved.toml --resume\n")
    fruitless = standstills(tmp_path / "run")[-FRUITLESS:]  # a busy machine may have stood still before
    assert ["nothing was found that would help" in one for one in fruitless] == [True] * FRUITLESS
