"""Whole runs through the command line: real engine, trainer, scorer and log."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from command import Process, shoal
from shoal.experience.audit import audit

CONFIG = """
[[tasks]]
name = "gcd"
service = "jsonl"
path = "{data}"
scorer = "contains"

[model]
path = "{model}"

[rollout]
group_size = 4
max_tokens = 8

[train]
steps = 6
groups_per_step = 2
lr = 1e-3

[eval]
every_steps = 3
questions = 4

[checkpoint]
every_steps = 2
"""
OUTCOME = {
    *("accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "reward_first", "reward_last"),
    *("eval_reward_before", "eval_reward_after"),
    *("wall_s", "steps", "samples_per_s", "staleness_max", "parity", "run_dir", "improvement", "warning"),
}


class Finished(NamedTuple):
    """A run as a user starts it, with --view."""

    config: Path
    done: Process
    url: str
    pages: list[str]
    """What the page said until the run had begun."""


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return written(tmp_path, tiny_model_dir)


def written(folder: Path, model: Path) -> Path:
    """A configuration that trains a tiny model for a few steps on questions of its own."""
    data = folder / "data.jsonl"
    rows = [{"prompt": f"say {letter}{n}", "answer": letter} for letter in "abcdefgh" for n in range(8)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    path = folder / "config.toml"
    path.write_text(CONFIG.format(data=data, model=model))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Finished:
    config = written(tmp_path_factory.mktemp("finished"), tiny_model_dir)
    command = [sys.executable, "-m", "shoal.cli", "train", str(config), "--run_dir=run", "--json", "--view"]
    command += ["--asynchrony.max_staleness=4", "--eval.every_steps=1"]
    # A browser that opens nothing.
    environment = {**os.environ, "BROWSER": "true"}
    with subprocess.Popen(
        command, cwd=config.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.fullmatch(r"page: (http://127\.0\.0\.1:\d+)\n", first)
        assert found is not None, first
        pages = []
        while not pages or "<h1>run</h1>" not in pages[-1]:
            with urlopen(found[1], timeout=120) as answer:
                pages.append(answer.read().decode())
            time.sleep(0.1)
        out, err = process.communicate(timeout=200)
    return Finished(config, subprocess.CompletedProcess(command, process.returncode, out, err), found[1], pages)


def test_a_run_trains_within_its_staleness_bound_and_its_audit_is_clean(finished: Finished) -> None:
    config, done = finished.config, finished.done
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome.keys() == OUTCOME
    assert outcome["steps"] == 6
    assert outcome["staleness_max"] <= 4
    report = audit(config.parent / "run")
    assert report.ok, report.sentences()
    assert report.consumed == 12
    assert (config.parent / "run" / "model" / "model.safetensors").is_file()
    assert (config.parent / "run" / "resolved.toml").is_file()
    assert "model: run/model\nreport: run/report.png and run/report.html" in done.stderr
    assert (config.parent / "run" / "report.png").is_file()
    records = [json.loads(line) for line in (config.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 6
    evals = [record for record in records if record["kind"] == "eval"]
    assert (evals[0]["step"], evals[-1]["step"]) == (0, 6)
    # A Version is pushed after each step, and an evaluation begins with that of its step.
    assert all(one["step"] <= one["version_oldest"] <= one["version_newest"] for one in evals), evals
    assert outcome["eval_reward_before"] == evals[0]["sampled_reward"]
    assert outcome["eval_reward_after"] == evals[-1]["sampled_reward"]
    taught_nothing = not any(step["informative_share"] for step in steps)
    assert "answering 4 held-out questions, twice" in done.stderr
    assert (outcome["warning"] != "") == taught_nothing == ("WARNING: no group of the last 6 steps" in done.stderr)


def test_the_page_of_a_run_is_there_before_it_and_goes_with_it(finished: Finished) -> None:
    assert "<h1>The run is about to begin</h1>" in finished.pages[0]
    assert "<h1>run</h1>" in finished.pages[-1]
    with pytest.raises(URLError):
        urlopen(finished.url, timeout=10)


def test_the_trained_model_can_be_evaluated_exported_reported_and_trained_on(finished: Finished) -> None:
    config = finished.config
    exported = shoal("export", "run", "--jsonl", "rollouts.jsonl", cwd=config.parent)
    assert exported.returncode == 0, exported.stderr
    rows = [json.loads(line) for line in (config.parent / "rollouts.jsonl").read_text().splitlines()]
    assert sum(row["consumed_step"] is not None for row in rows) == 12 * 4
    assert shoal("report", "run", cwd=config.parent).returncode == 0
    assert (config.parent / "run" / "report.html").is_file()
    evaluated = shoal("eval", str(config), "--model.path=run/model", "--json", cwd=config.parent)
    assert evaluated.returncode == 0, evaluated.stderr
    assert {"sampled", "greedy", "questions"} <= json.loads(evaluated.stdout.splitlines()[-1]).keys()
    # No answer of a model of six steps is a letter alone, so that nothing is learned, which nobody overlooks.
    again = shoal(
        *("train", str(config), "--model.path=run/model", "--run_dir=second", "--train.steps=1"),
        "--tasks.0.scorer=exact",
        cwd=config.parent,
    )
    assert again.returncode == 0, again.stderr
    assert "WARNING: no group of the last 1 steps" in again.stderr


def test_several_updates_per_step_and_pushes_every_second_step_give_half_as_many_versions(config: Path) -> None:
    done = shoal(
        *("train", str(config), "--run_dir=run", "--train.push_every=2", "--train.minibatches=2"),
        *("--train.reset_optimizer_at_push=true", "--train.warmup_steps=8", "--asynchrony.late=mask_tokens"),
        *("--rollout.temperature=2", "--rollout.group_size=16", "--train.lr=1e-4"),
        cwd=config.parent,
    )
    assert done.returncode == 0, done.stderr
    steps = [
        json.loads(line)
        for line in (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
        if '"step"' in line
    ]
    steps = [step for step in steps if step["kind"] == "step"]
    assert [step["version"] for step in steps] == [0, 0, 1, 1, 2, 2]
    # At a push the moments are forgotten and the rate begins anew; it would need eight updates, and there are four.
    rates = [step["lr"] for step in steps if step["version"] and step["lr"]]
    assert rates
    assert max(rates) <= 0.5e-4
    # Engine and trainer mean the same temperature: else fresh tokens had other logprobs in the one and the other.
    fresh = [step["mismatch_fresh"] for step in steps if step.get("mismatch_fresh") is not None]
    assert min(fresh, default=1.0) < 1e-3
    assert audit(config.parent / "run").ok


def test_a_run_whose_trainer_is_ahead_of_the_last_version_goes_on_with_resume(config: Path) -> None:
    options = ("--run_dir=run", "--train.push_every=1000", "--train.lr=0.01", "--train.entropy_bonus=0.1")
    killed = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "train", str(config), *options, "--train.steps=900"], cwd=config.parent
    )
    metrics = config.parent / "run" / "metrics.jsonl"
    while not (metrics.exists() and '"kind":"step"' in metrics.read_text()):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    steps = metrics.read_text().count('"kind":"step"') + 9
    resumed = shoal("train", str(config), *options, f"--train.steps={steps}", "--resume", cwd=config.parent)
    assert resumed.returncode == 0, resumed.stderr
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    same, ahead = (one["mismatch"] for one in records if one.get("name") == "parity")
    assert same < 1e-3 < ahead
    assert audit(config.parent / "run").ok


def test_a_dry_run_calls_each_reward_once_and_names_the_line_that_fails(config: Path) -> None:
    (config.parent / "boom.py").write_text("def boom(completions, **columns):\n    return [1 / 0]\n")
    (config.parent / "broken.py").write_text("def f()\n    pass\n")
    scorers = {
        '{ name = "function", path = "boom:boom" }': "ZeroDivisionError: division by zero (boom.py:2 in boom)",
        '{ name = "function", path = "boom:bom" }': "boom has no 'bom'; did you mean 'boom'?",
        '{ name = "function", path = "boom.py:boom" }': "boom.py:boom: ZeroDivisionError",
        '{ name = "function", path = "broken:f" }': "SyntaxError: expected ':' (broken.py, line 1)",
    }
    for scorer, why in scorers.items():
        done = shoal(
            "train", str(config), "--run_dir=run", "--dry-run", f"--tasks.0.scorer={scorer}", cwd=config.parent
        )
        assert done.returncode == 2, done.stdout
        assert why in done.stderr
        assert not (config.parent / "run").exists()


WORKS_ON_TRUTHS = """
def helpful(completions, answer, **columns):
    said = [completion[0]["content"] for completion in completions]
    if said == answer:
        return [1.0] * len(said)
    raise KeyError("my own fault")
"""


def test_a_reward_that_fails_in_a_run_is_told_with_its_line_while_it_runs_and_afterwards(config: Path) -> None:
    (config.parent / "helping.py").write_text(WORKS_ON_TRUTHS)
    scorer = '--tasks.0.scorer={ name = "function", path = "helping:helpful" }'
    done = shoal("train", str(config), "--run_dir=run", scorer, cwd=config.parent)
    why = "scorer: failed: helping:helpful: KeyError: 'my own fault' (helping.py:6 in helpful)"
    assert done.returncode == 2, done.stdout
    assert f"all for one reason: {why}; mend that" in done.stderr
    assert f"warning: {why}" in shoal("status", "run", cwd=config.parent).stdout
    assert shoal("export", "run", "--jsonl", "out.jsonl", cwd=config.parent).returncode == 0
    rows = [json.loads(line) for line in (config.parent / "out.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in rows} == {why}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["--train.lrr=1"], "train.lrr: unknown setting; did you mean 'train.lr'?"),
        (["--model.path=./nowhere"], "model './nowhere' does not exist"),
        (["--tasks.0.service=reasoning_gym", "--tasks.0.name=gdc"], "did you mean 'gcd'?"),
        (["--engine.max_model_len=6"], "expected prompts shorter than the model's context of 6 tokens"),
        (["--rollout.max_tokens=0"], "rollout.max_tokens"),
        (["--rollout.max_tokens=5000"], "tokens of the model's context, got 5000"),
        (["--rollout.group_size=1"], "rollout.group_size: expected at least 2 with train.advantage = 'grpo', got 1"),
        (["--run_dir=/proc/nowhere/run"], "/proc/nowhere/run cannot be written"),
        (["--run_dir=full"], "full exists already; resume it with --resume or choose another run_dir"),
        (["--resume"], "run holds no run to resume"),
        (['--engine.urls=["http://127.0.0.1:9"]'], "no answer from http://127.0.0.1:9"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_and_leaves_nothing(
    config: Path, overrides: list[str], sentence: str
) -> None:
    (config.parent / "full").mkdir()
    (config.parent / "full" / "something").touch()
    before = sorted(config.parent.rglob("*"))
    done = shoal("train", str(config), "--run_dir=run", *overrides, cwd=config.parent)
    *steps, complaint = done.stderr.splitlines()
    assert done.returncode == 2
    assert complaint.startswith("shoal: ")
    assert sentence in complaint
    assert set(steps) <= {"checking model, tasks and rewards", "starting engines and reward workers"}
    assert sorted(config.parent.rglob("*")) == before


def test_a_model_without_a_tokenizer_is_refused_by_name(config: Path, tiny_model_dir: Path) -> None:
    bare = config.parent / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_model_dir / name).read_bytes())
    done = shoal("train", str(config), f"--model.path={bare}", cwd=config.parent)
    assert done.returncode == 2
    assert "has no tokenizer.json" in done.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(config: Path) -> None:
    before = sorted(config.parent.rglob("*"))
    done = shoal("train", str(config), "--run_dir=run", "--dry-run", "--json", cwd=config.parent)
    plan = json.loads(done.stdout)
    assert plan["rollouts_per_step"] == 8
    assert plan["staleness_bound"] == 2
    assert plan["parameters"] > 0
    kept_mb = plan["parameters"] * 16 / 1e6  # weights, gradient and moments
    assert plan["trainer_memory_mb"] == pytest.approx(kept_mb, abs=0.1)
    assert sorted(config.parent.rglob("*")) == before


def test_a_synchronous_run_with_adapters_leaves_merged_weights_and_the_adapters_and_resumes(
    config: Path, tiny_model_dir: Path
) -> None:
    from safetensors.torch import load_file

    adapted = ("--run_dir=run", "--train.lora.rank=4", "--train.lr=1e-2", "--asynchrony.max_staleness=0", "--json")
    done = shoal("train", str(config), *adapted, "--train.steps=3", cwd=config.parent)
    assert done.returncode == 0, done.stderr
    run = config.parent / "run"
    done = shoal("train", str(config), *adapted, "--resume", cwd=config.parent)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["steps"], outcome["staleness_max"]) == (6, 0)
    assert audit(run).ok
    base, merged = (load_file(path / "model.safetensors") for path in (tiny_model_dir, run / "model"))
    changed = {name for name in merged if not merged[name].equal(base[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    assert {path.name for path in (run / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    done = shoal("train", str(config), *adapted, "--train.steps=2", "--resume", cwd=config.parent)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [one["step"] for one in records if one["kind"] == "eval"]
    assert evals[-2:] == [6, 6], "the weights are those of 6 steps, however few are asked for"
