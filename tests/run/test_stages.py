"""Stages: imitation and preference pairs have torch's gradients, a stage resumes, the next begins with its model."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_models import plain
from shoal.config import Config, TaskConfig, parse
from shoal.config.settings import StageConfig
from shoal.errors import ConfigError, RunDirError, TaskError
from shoal.experience.checkpoint import checkpoints
from shoal.experience.log import locked
from shoal.model.renderer_loading import load_renderer
from shoal.run.commands.supervised import run_stages, run_supervised, trained_rows, turns_of
from shoal.tasks.holdout import EVAL_SHARE, split_of
from shoal.types import Json, Message, Role, Split

ALL = [(a, b) for a in range(1, 6) for b in range(1, 6)]
SUMS = [(a, b) for a, b in ALL if split_of(f"{a}+{b}", EVAL_SHARE) is Split.TRAIN][:16]
"""Sums that the configured task does not hold out."""


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(path: Path) -> Path:
    rows = [{"messages": [said("user", f"{a}+{b}"), said("assistant", str(a + b))]} for a, b in SUMS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(path: Path) -> Path:
    rows = [
        {name: [said("user", f"{a}+{b}"), said("assistant", answer)] for name, answer in given.items()}
        for a, b in SUMS
        for given in [{"chosen": str(a + b), "rejected": "no"}]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(model: Path, run_dir: Path, **train: object) -> Config:
    settings = {"steps": 1, "groups_per_step": 16, "lr": 1e-3, "max_grad_norm": 1e9, **train}
    return parse(
        {"run_dir": str(run_dir), "model": {"path": str(model)}, "tasks": [{"name": "chain_sum"}], "train": settings}
    )


def logprob(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits.gather(-1, torch.tensor(answer)[:, None]).sum()


def stepped(model_dir: Path, loss: object) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights after one step of torch's Adam on a loss, and its gradient."""
    model = plain(model_dir)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    assert callable(loss)
    loss(model).backward()
    optimizer.step()
    return {
        name: (p.detach(), torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters()
    }


def tokens(model_dir: Path, a: int, b: int, answer: str) -> tuple[list[int], list[int]]:
    renderer = load_renderer(model_dir)
    prompt = renderer.prompt_ids([Message(Role.USER, f"{a}+{b}")])
    return prompt, [*renderer.token_ids(answer), renderer.stop_token_ids[0]]


def assert_same(found: Path, wanted: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    weights = load_file(found / "model" / "model.safetensors")
    for name, tensor in weights.items():
        other, gradient = wanted[name]
        # Adam's first step makes the rounding of a gradient near its epsilon (1e-8) as large as any step.
        is_rounding = (gradient.abs() < 1e-7) & (gradient != 0)
        assert is_rounding.float().mean() < 0.01
        torch.testing.assert_close(tensor[~is_rounding], other[~is_rounding], atol=5e-5, rtol=0)


def test_imitation_has_the_gradient_of_cross_entropy(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model_dir, tmp_path / "run", loss="positive_only")
    run_supervised(config, conversations(tmp_path / "sums.jsonl"))

    def loss(model: torch.nn.Module) -> torch.Tensor:
        rows = [tokens(tiny_model_dir, a, b, str(a + b)) for a, b in SUMS]
        return -torch.stack([logprob(model, *row) for row in rows]).sum() / sum(len(answer) for _, answer in rows)

    assert_same(tmp_path / "run", stepped(tiny_model_dir, loss))


def test_preference_pairs_have_the_gradient_of_dpo(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model_dir, tmp_path / "run", loss={"name": "dpo", "beta": 0.5})
    figures = run_supervised(config, pairs(tmp_path / "pairs.jsonl"))
    reference = plain(tiny_model_dir)

    def margin(model: torch.nn.Module, a: int, b: int) -> torch.Tensor:
        chosen, rejected = (logprob(model, *tokens(tiny_model_dir, a, b, text)) for text in (str(a + b), "no"))
        return chosen - rejected

    def loss(model: torch.nn.Module) -> torch.Tensor:
        distances = [margin(model, a, b) - margin(reference, a, b).detach() for a, b in SUMS]
        return -torch.nn.functional.logsigmoid(0.5 * torch.stack(distances)).mean()

    assert figures["loss_first"] == pytest.approx(0.6931, abs=1e-3)
    assert_same(tmp_path / "run", stepped(tiny_model_dir, loss))


@pytest.mark.parametrize("loss", ["positive_only", "dpo"])
def test_a_stage_trains_on_no_question_that_a_task_holds_out_and_says_how_many(loss: str, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{a}+{b}", "answer": str(a + b)}) + "\n" for a, b in ALL))
    task = TaskConfig(name="sums", service="jsonl", path=str(questions), eval_share=EVAL_SHARE)
    config = config_of(tmp_path, tmp_path / "run", loss=loss).model_copy(update={"tasks": [task]})
    name = "chosen" if loss == "dpo" else "messages"

    def row(a: int, b: int, system: str) -> tuple[dict[str, Json], str]:
        return {name: [said("system", system), said("user", f" {a} + {b}\n"), said("assistant", "x")]}, f"{a}+{b}"

    kept, told = trained_rows([row(a, b, system) for a, b in ALL for system in ("", "Be brief.")], config)
    trained = [f"{a}+{b}" for a, b in ALL if split_of(f"{a}+{b}", EVAL_SHARE) is Split.TRAIN]
    assert {where for _, where in kept} == set(trained)
    assert told.startswith(f"{2 * len(ALL) - len(kept)} of {2 * len(ALL)} rows ask held-out questions")


def test_conversations_of_a_stage_that_no_file_asks_are_all_trained(tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path / "run", loss="positive_only")
    rows: list[tuple[dict[str, Json], str]] = [
        ({"messages": [said("user", first), said("assistant", "x"), said("user", str(n)), said("assistant", "y")]}, "")
        for first in ("Hi", "Hello", "Help", "Thanks")
        for n in range(20)
    ]
    assert trained_rows(rows, config) == (rows, "")


def test_every_turn_of_the_assistant_is_taught_and_nothing_else(tiny_model_dir: Path) -> None:
    renderer = load_renderer(tiny_model_dir)
    row = {"messages": [said("user", "a"), said("assistant", "bc"), said("user", "d"), said("assistant", "e")]}
    rows = turns_of(renderer, row, "row")
    taught = [renderer.text([t for t, m in zip(r.tokens, r.mask, strict=True) if m]) for r in rows]
    assert taught == ["bc", "e"]
    assert "bc" in renderer.text(rows[1].tokens[: -sum(rows[1].mask)])
    with pytest.raises(TaskError, match="an assistant's message"):
        turns_of(renderer, {"messages": [said("user", "a")]}, "row")


def test_a_resumed_stage_gets_the_weights_of_one_that_never_ended(tiny_model_dir: Path, tmp_path: Path) -> None:
    data = conversations(tmp_path / "sums.jsonl")
    whole = config_of(tiny_model_dir, tmp_path / "whole", loss="positive_only", steps=6, groups_per_step=5)
    run_supervised(
        whole.model_copy(update={"checkpoint": whole.checkpoint.model_copy(update={"every_steps": 4})}), data
    )
    assert [one.step for one in checkpoints(tmp_path / "whole")] == [3, 5]
    part = config_of(tiny_model_dir, tmp_path / "part", loss="positive_only", steps=3, groups_per_step=5)
    run_supervised(part, data)
    run_supervised(whole.model_copy(update={"run_dir": part.run_dir}), data, resume=True)
    weights = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert_same(tmp_path / "part", {name: (tensor, torch.ones_like(tensor)) for name, tensor in weights.items()})


@pytest.mark.parametrize("several", [False, True])
def test_a_stage_in_a_directory_that_another_process_writes_is_refused_and_leaves_it_alone(
    several: bool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config, data = config_of(tiny_model_dir, tmp_path / "run"), conversations(tmp_path / "sums.jsonl")
    stages = config.model_copy(update={"stages": (StageConfig(kind="sft", data=str(data)),)})
    with locked(tmp_path / "run"), pytest.raises(RunDirError, match="does another process write this run"):
        run_stages(stages, resume=True) if several else run_supervised(config, data)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log.lock"]


def test_a_stage_begins_with_the_model_of_the_stage_before(tiny_model_dir: Path, tmp_path: Path) -> None:
    conversations(tmp_path / "sums.jsonl")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{a}+{b}", "answer": str(a + b)}) + "\n" for a, b in SUMS))
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tiny_model_dir)},
        "tasks": [{"name": "sums", "service": "jsonl", "path": str(questions), "eval_share": 0.25}],
        "rollout": {"group_size": 2, "max_tokens": 4},
        "eval": {"questions": 2},
        "train": {"steps": 2, "groups_per_step": 2},
        "stages": [
            {"kind": "sft", "data": str(tmp_path / "sums.jsonl"), "train": {"lr": 1e-2, "steps": 3}},
            {"kind": "rl", "train": {"teacher": str(tiny_model_dir)}},
        ],
    }
    (tmp_path / "run" / "stages" / "1-rl" / "logs").mkdir(parents=True)  # it was killed before its log began
    figures = run_stages(parse(tree), resume=True)
    assert list(figures)[:2] == ["0-sft", "1-rl"]
    resolved = (tmp_path / "run" / "stages" / "1-rl" / "resolved.toml").read_text()
    assert str(tmp_path / "run" / "stages" / "0-sft" / "model") in resolved
    again = run_stages(parse(tree), resume=True)  # nothing is left to do
    assert again == figures


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"kind": "sft"}, "stages.0.data: expected a file"),
        ({"kind": "rl", "data": "x.jsonl"}, "stages.0.data"),
        ({"kind": "rl", "train": {"loss": "dpo"}}, "stages.0.train.loss"),
        ({"kind": "sft", "data": "x.jsonl", "train": {"step": 3}}, "stages.0.train.step"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_by_name(stage: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse({"tasks": [{"name": "chain_sum"}], "stages": [stage]})


def test_a_teacher_replaces_the_rewards(tiny_model_dir: Path) -> None:
    from shoal.trainer.trainer import Trainer
    from shoal.types import Sample

    generator = random.Random(0)
    row = tuple(generator.randrange(6, 90) for _ in range(9))
    config = config_of(tiny_model_dir, Path("run"), teacher=str(tiny_model_dir), loss="reinforce")
    trainer = Trainer(tiny_model_dir, config.model, config.train)
    (logp,) = trainer.logprobs([row])
    mask = (0, 0, 0, 1, 1, 1, 1, 1, 1)
    sample = Sample(row, mask, (0.0, *logp), tuple(m - 1 for m in mask), tuple(5.0 * m for m in mask))
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    stats = trainer.step([[sample]])
    assert stats.kl == pytest.approx(
        0.0, abs=1e-5
    )  # the teacher is the student: nothing to learn, whatever rewards say
    assert stats.grad_norm == pytest.approx(0.0, abs=1e-4)
    assert before.keys() == trainer.tensors().keys()
