"""A dry run finds what would stop a run in its first step, the cheap mistakes before anything takes time."""

import json
from pathlib import Path

import pytest

from command import shoal

WRONG = {
    "[0.5]": "got a list of 1: [0.5]",
    "0.5": "got 0.5",
    "'1.0'": "got the text '1.0'",
    "['1.0'] * n": "expected finite numbers or None, got the text '1.0'",
    "[float('nan')] * n": "expected finite numbers or None, got nan",
    "[[1.0]] * n": "expected finite numbers or None, got a list of 1: [1.0]",
    "{i: 1.0 for i in range(n)}": "got {0: 1.0",
    "None": "got None",
    "[1.0] * (n + 1)": "got a list of 5",
}
RIGHT = ("[1.0] * n", "[True] * n", "(1,) * n", "[None] * n", "numpy.ones(n)", "[numpy.float32(1)] * n")
MODULE = """
import numpy

from shoal.tasks.sdk import Question, environment

def reward(prompts, completions, **columns):
    n = len(completions)
    return GIVEN

@environment("own")
class Own:
    def draw(self, rng):
        return Question(f"say {rng.randrange(10**9)}", "x")

    def scores(self, asked, answers):
        n = len(answers)
        return GIVEN
"""
USES = {
    "function": ('--tasks.0.scorer={name = "function", path = "rewards.py:reward"}',),
    "task": ("--tasks.0.service=python", "--tasks.0.path=rewards.py:Own"),
}


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A folder with a configuration that a dry run accepts."""
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "config.toml").write_text(
        f'[model]\npath = "{tiny_model_dir}"\n[[tasks]]\nname = "sums"\nservice = "jsonl"\npath = "rows.jsonl"\n'
        "[rollout]\ngroup_size = 4\n"
    )
    return tmp_path


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given", WRONG)
def test_rewards_of_a_wrong_shape_are_refused_with_what_came(use: str, given: str, folder: Path) -> None:
    (folder / "rewards.py").write_text(MODULE.replace("GIVEN", given))
    said = shoal("train", "config.toml", "--dry-run", *USES[use], cwd=folder)
    assert said.returncode == 2, said
    assert "tasks.sums" in said.stderr
    assert WRONG[given] in said.stderr
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("use", "given"), [(use, given) for use in USES for given in RIGHT if use == "function" or "None" not in given]
)
def test_rewards_of_a_right_shape_pass(use: str, given: str, folder: Path) -> None:
    (folder / "rewards.py").write_text(MODULE.replace("GIVEN", given))
    said = shoal("train", "config.toml", "--dry-run", *USES[use], cwd=folder)
    assert said.returncode == 0, said


@pytest.mark.parametrize(
    "mistake",
    [
        "--tasks.0.path=nowhere.jsonl",
        "--tasks.0.scorer=magic",
        "--tasks.0.reward=nowhere.py:f",
        "--tasks.0.agent=nowhere.py:f",
        '--tasks.0.scorer={name = "function", path = "nowhere.py:f"}',
    ],
)
@pytest.mark.parametrize("model", ["demo", "cut.gguf"])
def test_mistakes_in_tasks_are_told_before_a_model_is_made(
    mistake: str, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "cut.gguf").write_bytes(b"GGUF")
    said = shoal("train", "config.toml", "--dry-run", f"--model.path={model}", mistake, cwd=folder)
    assert said.returncode == 2, said
    assert "nowhere" in said.stderr or "magic" in said.stderr
    assert "(once)" not in capfd.readouterr().err
    assert not (folder / "cache").exists()


def test_a_plan_for_people_has_a_line_for_each_part_of_memory(folder: Path) -> None:
    said = shoal("train", "config.toml", "--dry-run", cwd=folder)
    assert "memory_mb.engine.weights" in said.stdout
    assert "{" not in said.stdout
