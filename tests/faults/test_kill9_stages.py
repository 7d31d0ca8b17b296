"""A configuration of two stages may be killed within and between them: it goes on, and no step is taken twice."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.experience.audit import audit
from until import until

SUMS = [(a, b) for a in range(1, 5) for b in range(1, 5)]
SFT_STEPS, RL_STEPS = 24, 6


def written(folder: Path, model: Path) -> Path:
    """Configuration of a stage of imitation and one of reinforcement, with their data."""
    said = [[{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}] for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in said))
    questions = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in SUMS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    config = folder / "config.toml"
    config.write_text(
        f'run_dir = "run"\n[[tasks]]\nname = "sums"\nservice = "jsonl"\npath = "questions.jsonl"\neval_share = 0.25\n'
        f'[model]\npath = "{model}"\n[rollout]\ngroup_size = 2\nmax_tokens = 4\n[eval]\nquestions = 2\n'
        f'[checkpoint]\nevery_steps = 2\n[[stages]]\nkind = "sft"\ndata = "sums.jsonl"\n'
        f"train = {{ lr = 1e-2, steps = {SFT_STEPS}, groups_per_step = 4 }}\n"
        f'[[stages]]\nkind = "rl"\ntrain = {{ steps = {RL_STEPS}, groups_per_step = 2 }}\n'
    )
    return config


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal.cli", "train", "config.toml", "--json", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed_when(process: subprocess.Popen[str], true: Callable[[], bool]) -> None:
    def due() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return true()

    asyncio.run(until(due, 120))
    process.kill()
    process.communicate()


def steps_of(stage: Path) -> list[int]:
    """Steps that a stage has logged, in order."""
    file = stage / "metrics.jsonl"
    records = map(json.loads, file.read_text().splitlines()[:-1]) if file.exists() else []
    return [record["step"] for record in records if record["kind"] == "step"]


@pytest.mark.timeout(400)
def test_two_stages_killed_within_and_between_them_end_as_if_nothing_had_been(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    written(tmp_path, tiny_model_dir)
    sft, rl = (tmp_path / "run" / "stages" / name for name in ("0-sft", "1-rl"))
    killed_when(started(tmp_path), lambda: len(steps_of(sft)) > 4)
    assert not (sft / "done.json").exists()
    killed_when(started(tmp_path, "--resume"), (sft / "done.json").exists)
    assert not steps_of(rl)
    model = (sft / "model" / "model.safetensors").read_bytes()
    killed_when(started(tmp_path, "--resume"), lambda: len(steps_of(rl)) > 2)
    last = started(tmp_path, "--resume")
    out, err = last.communicate(timeout=200)
    assert last.returncode == 0, err
    assert (sft / "model" / "model.safetensors").read_bytes() == model  # the ended stage was left alone
    after = audit(rl)
    assert after.ok, after.sentences()
    assert (after.steps, after.consumed) == (RL_STEPS, 2 * RL_STEPS)
    figures = json.loads(out.splitlines()[-1])
    assert (figures["0-sft"]["steps"], figures["1-rl"]["steps"]) == (SFT_STEPS, RL_STEPS)
