"""An engine that outlives its run."""

from pathlib import Path

from engine_server import serving
from shoal.experience.audit import audit
from train_runs import start, wait_for_steps


def test_a_resumed_run_goes_on_with_an_engine_that_serves_a_version_of_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The resumed run knows from its log which Versions are its own."""
    with serving(tiny_model_dir) as engine:
        settings = (f'--engine.urls=["{engine.url}"]', "--asynchrony.max_staleness=0")
        first = start(tmp_path, tiny_model_dir, *settings, SHOAL_ENGINE_TOKEN=engine.token)
        wait_for_steps(tmp_path / "run", 3, first)
        first.kill()
        first.communicate()
        steps = audit(tmp_path / "run").steps + 2
        more = (*settings, f"--train.steps={steps}", "--resume")
        again = start(tmp_path, tiny_model_dir, *more, SHOAL_ENGINE_TOKEN=engine.token)
        _, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert audit(tmp_path / "run").steps == steps
