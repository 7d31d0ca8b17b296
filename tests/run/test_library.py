"""Shoal as a library: the examples run, keywords are settings, and one's own mathematics is checked and carried."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import service_tasks
import shoal
from command import Process
from command import shoal as shoal_command
from shoal.config import ModelConfig
from shoal.config.training import OwnLoss, ReinforceLoss, TrainConfig
from shoal.errors import ConfigError
from shoal.library.calls import config_of
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

EXAMPLES = Path(__file__).parents[2] / "examples" / "library"

MINE = """
def reinforce(s):
    return -(s.logp_T - s.behav_T).exp().detach().clamp(max=2) * s.advantage_T * s.logp_T
def flat(s):
    return s.advantage_T
def centred(rewards):
    return [[reward - sum(group) / len(group) for reward in group] for group in rewards]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return lambda name: f"{file}:{name}"


def test_a_function_is_named_by_its_script_and_one_of_a_prompt_is_refused(tmp_path: Path) -> None:
    source = "from shoal.plugins import name_of\ndef mine(): ...\nprint(name_of('reward', mine))"
    (tmp_path / "script.py").write_text(source)
    named = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert named.stdout == f"{tmp_path / 'script.py'}:mine\n"
    refused = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert "reward: 'mine' is in no file" in refused.stderr


@pytest.mark.parametrize("example", ["one_call", "own_mathematics", "own_loop"])
def test_an_example_runs_and_has_at_most_30_lines(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in (EXAMPLES / f"{example}.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{example}.py", "4"])
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    if example == "own_loop":
        sampled_under = [
            json.loads(line.partition("Versions ")[2]) for line in capsys.readouterr().out.splitlines()[:4]
        ]
        assert all(step - 2 <= min(versions) <= max(versions) <= step for step, versions in enumerate(sampled_under))
        assert (tmp_path / "backward-model" / "model.safetensors").is_file()
    else:
        (run,) = (tmp_path / "runs").iterdir()
        assert (run / "model" / "model.safetensors").is_file()


def test_the_front_door_has_under_thirty_names_with_docstrings_and_loads_no_torch() -> None:
    assert 12 <= len(shoal.__all__) < 30
    assert all(getattr(shoal, name).__doc__ for name in shoal.__all__)
    script = "import sys, shoal; assert shoal.train and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"it has .*train"):
        _ = shoal.trian


def test_keywords_are_settings_wherever_they_belong() -> None:
    config = config_of(
        "demo", "chain_sum", steps=5, group_size=4, max_staleness=1, swarm={"external_groups": 0}, seed=7
    )
    assert (config.train.steps, config.rollout.group_size, config.asynchrony.max_staleness) == (5, 4, 1)
    assert config.seed == 7
    assert [task.name for task in config.tasks] == ["chain_sum"]


def test_environments_become_tasks_by_the_name_under_which_other_processes_find_them() -> None:
    tasks = config_of("demo", [service_tasks.words, service_tasks.Fast]).tasks
    assert [(task.name, task.service) for task in tasks] == [("words", "python"), ("fast", "python")]
    assert [(task.path or "").rpartition(":")[2] for task in tasks] == ["words", "Fast"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stepz": 5}, "stepz: no setting has this name"),
        ({"timeout_s": object()}, "expected a setting's value or a function"),
        ({"every_steps": 3}, "eval, checkpoint have it"),
        ({"steps": -1}, "train.steps"),
    ],
)
def test_wrong_keywords_are_refused_by_name(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of("demo", "chain_sum", **settings)


@pytest.mark.parametrize(
    "task",
    [
        {"name": "chain_sum", "scorer": "exact"},
        {"name": "mine", "service": "jsonl", "path": "rows.jsonl", "scorer": {"name": "math"}},
        {"name": "hanoi", "service": "turns"},
        service_tasks.words,
    ],
)
def test_a_reward_beside_a_task_that_scores_itself_is_refused(task: object) -> None:
    with pytest.raises(ConfigError, match="expected none for"):
        config_of("demo", ["basic_arithmetic", task], reward="json:loads")


def test_rows_become_a_file_of_questions() -> None:
    (task,) = config_of("demo", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]).tasks
    rows = [json.loads(line) for line in Path(task.path or "").read_text().splitlines()]
    assert rows[3] == {"prompt": "3+1=", "answer": "4"}


def test_an_own_loss_trains_as_the_same_formula_of_shoal_does(mine: Callable[[str], str], tiny_model_dir: Path) -> None:
    def trained(loss: OwnLoss | ReinforceLoss) -> dict[str, torch.Tensor]:
        trainer = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(loss=loss, lr=1e-2))
        trainer.step([rows])
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    rows = tuple(
        Sample((7, 8, 9, 10), (0, 1, 1, 1), (0.0, -1.0, -2.0, -0.5), (-1, 0, 0, 0), (0.0, a, a, a)) for a in (1.0, -1.0)
    )
    own, ours = trained(OwnLoss(function=mine("reinforce"))), trained(ReinforceLoss(weight_cap=2.0))
    assert all(torch.equal(own[name], ours[name]) for name in ours)


def test_a_run_with_another_loss_than_it_began_with_is_refused(tmp_path: Path) -> None:
    def ended(*more: str) -> Process:
        return shoal_command("train", "run.toml", *more, cwd=tmp_path)

    (tmp_path / "own_loss.py").write_text(MINE)
    (tmp_path / "run.toml").write_text(
        'run_dir = "run"\n[rollout]\nmax_tokens = 12\n[[tasks]]\nname = "spell_backward"\n'
        '[train]\nsteps = 1\nloss = "own_loss:reinforce"\nadvantage = "own_loss:centred"\n[eval]\nquestions = 4\n'
    )
    assert ended("--dry-run").returncode == 0
    refused = ended("--dry-run", "--train.loss=own_loss:flat")
    assert refused.returncode == 2
    assert "expected a gradient" in refused.stderr
    first = ended()
    assert first.returncode == 0, first.stderr
    (tmp_path / "own_loss.py").write_text(MINE + "# another\n")
    again = ended("--resume", "--train.steps=2")
    assert again.returncode == 2
    assert "was written with own_code = own_loss:reinforce@" in again.stderr
