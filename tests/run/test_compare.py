"""`shoal compare` with real engines."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from command import shoal
from engine_server import threaded
from shoal.config import to_toml
from shoal.library.calls import config_of
from shoal.run.demo_model.warm_start import DEMO_TASK, demo_model


def spoiled(directory: Path) -> Path:
    """The demo's model with a last norm of 0, so that it says the same token for ever."""
    shutil.copytree(demo_model()[0], directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_run_is_compared_with_the_model_it_began_with(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "resolved.toml").write_text(to_toml(config_of("demo", DEMO_TASK, run_dir=str(run), max_tokens=12)))
    (run / "metrics.jsonl").touch()
    spoiled(run / "model")
    done = shoal(
        "compare", "mine@start", "mine", "--questions=32", "--json", "--rollout.temperature=1e-5", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sampled"]["first"] == found["greedy"]["first"] > 0.3, "settings hold for both"
    assert found["sampled"]["second"] == 0
    assert found["sampled"]["high"] < 0
    assert found["verdict"].startswith("runs/mine: worse than runs/mine@start by at least ")


def test_the_model_of_an_engine_at_a_url_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run.toml"
    config.write_text(to_toml(config_of("demo", DEMO_TASK, run_dir=str(tmp_path / "run"), max_tokens=12)))
    with threaded(demo_model()[0], "--max-model-len", "64") as server:
        monkeypatch.setenv("SHOAL_ENGINE_TOKEN", server.token)
        done = shoal("compare", "demo", server.url, f"--config={config}", "--questions=16", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["greedy"]["first"] == found["greedy"]["second"] > 0.3, "it is the same model"
    assert found["verdict"].startswith(f"{server.url}: not surely better or worse than demo: between")


def test_two_models_without_tasks_are_refused(tmp_path: Path) -> None:
    done = shoal("compare", "demo", "demo", cwd=tmp_path)
    assert done.returncode == 2
    assert "demo and demo: expected a run among them, or --config with the tasks to ask" in done.stderr
