"""A run that samples from a part of the probability only."""

import json
from pathlib import Path

import pytest

from engine_server import threaded
from sglang_contract import contract
from shoal.experience.audit import audit
from shoal.experience.log import read, read_step
from train_runs import finished, start

SYNCHRONOUS = ("--asynchrony.max_staleness=0", "--train.steps=3")


@pytest.mark.parametrize("loss", ["decoupled", "grpo"])
def test_a_run_trains_among_the_tokens_that_it_sampled_from(loss: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    """Under the weights that sampled, each token has the probability that it was sampled with."""
    (tmp_path / "odd.py").write_text(
        "def odd(prompts, completions, **columns):\n"
        "    return [sum(map(ord, one[0]['content'])) % 2 for one in completions]\n"
    )
    scorer = '--tasks.0.scorer={name = "function", path = "odd.py:odd"}'
    settings = (scorer, "--rollout.top_k=3", "--rollout.top_p=0.9", f"--train.loss={loss}")
    run = finished(tmp_path, tiny_model_dir, *SYNCHRONOUS, *settings)
    report = audit(run)
    assert report.ok, report.sentences()
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 3
    for step in steps:
        assert step["ratio_max"] == pytest.approx(1, abs=1e-3), step
        assert step["mismatch"] < 1e-4
    groups = read(run, lambda connection: read_step(connection, 0))
    kept = [len(ids) // 4 for group in groups for one in group.rollouts for ids in one.turns[0].completion.kept]
    assert kept
    assert set(kept) <= {1, 2, 3}


@pytest.mark.parametrize(
    ("setting", "untold"),
    [
        ("--rollout.top_p=0.9", "which tokens could be sampled"),
        ("--train.router_replay=true", "the experts of its tokens"),
    ],
)
def test_a_server_that_does_not_tell_what_training_needs_is_refused(
    setting: str, untold: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    with threaded(tiny_model_dir) as engine, contract(engine.url) as (url, _):
        process = start(tmp_path, tiny_model_dir, f'--engine.urls=["{url}"]', setting)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 2
    assert f"its server does not report {untold}" in err
