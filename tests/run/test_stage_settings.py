"""Supervised stages have the settings that are theirs: others change no loss, and are refused by name."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine_models import plain
from pairwise import Case, covering, title
from shoal.config import Config, parse
from shoal.config.training import OWN_SETTINGS, TrainConfig
from shoal.errors import ConfigError
from shoal.model.renderer_loading import load_renderer
from shoal.run.commands.supervised import _as_trained, _margins, _preferred, pair_of, run_supervised, turns_of
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

AXES = {
    "kind": ["sft", "dpo"],
    "advantage": [None, "gae", "batch", "rloo", "group_batch"],
    "teacher": [None, "itself"],
    "kl": [None, {"coefficient": 0.5, "where": "loss"}, {"coefficient": 0.5, "where": "reward", "estimator": "k1"}],
    "entropy_bonus": [None, 0.5],
    "loss": [None, "gspo", {"name": "decoupled", "weight_cap": 2.0}],
    "loss_mean": [None, "rows", "tokens"],
    "minibatches": [None, 2],
    "turn_discount": [None, 0.5],
    "temperature": [None, 0.5],
}
SUMS = [(a, b) for a in range(1, 3) for b in range(1, 3)]
BETA, LR = 0.1, 1e-3


def is_possible(case: Case) -> bool:
    """Whether a run could have these settings."""
    return (
        (case["teacher"] is None or (case["advantage"] in (None, "rloo", "group_batch") and case["kl"] is None))
        and (case["advantage"] != "gae" or case["turn_discount"] is None)
        and (case["kind"] == "dpo" or case["minibatches"] is None)  # two updates are no one step
    )


class Here:
    """A trainer of this process, asked as one of another."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    async def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.trainer.logprobs(rows)


def lessons_of(kind: str, model: Path) -> list[tuple[Sample, ...]]:
    renderer = load_renderer(model)
    said = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    lessons = []
    for a, b in SUMS:
        right, wrong = ([{**said[0], "content": f"{a}+{b}"}, {**said[1], "content": t}] for t in (f"{a + b}", "no"))
        if kind == "dpo":
            lessons.append(pair_of(renderer, {"chosen": right, "rejected": wrong}, "row"))
        else:
            lessons.append(turns_of(renderer, {"messages": right}, "row"))
    return lessons


def definition(kind: str, model: Path, lessons: Sequence[Sequence[Sample]], mean: str) -> dict[str, torch.Tensor]:
    """Weights after one step of torch's Adam in float64 on the loss as its paper defines it."""
    ours, reference = plain(model).double(), plain(model).double()

    def logp(one: torch.nn.Module, row: Sample) -> torch.Tensor:
        tokens = torch.tensor(row.tokens)
        logp_L = one(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return logp_L[torch.tensor(row.mask[1:]).bool()]

    if kind == "dpo":
        distances = [[logp(ours, row).sum() - logp(reference, row).sum().detach() for row in pair] for pair in lessons]
        loss = -torch.stack([F.logsigmoid(BETA * (chosen - other)) for chosen, other in distances]).mean()
    else:
        rows = [logp(ours, row) for lesson in lessons for row in lesson]
        loss = -(torch.stack([row.mean() for row in rows]) if mean == "rows" else torch.cat(rows)).mean()
    optimizer = torch.optim.Adam(ours.parameters(), lr=LR)
    loss.backward()
    optimizer.step()
    return {name: p.detach().float() for name, p in ours.named_parameters()}


def config_of(case: Case, model: Path) -> Config:
    others = {name: value for name, value in case.items() if name not in ("kind", "temperature") and value is not None}
    if "teacher" in others:
        others["teacher"] = str(model)
    tree = {
        "model": {"path": str(model), "device": "cpu"},
        "tasks": [{"name": "chain_sum"}],
        "train": {**others, "groups_per_step": 4, "lr": LR, "max_grad_norm": 1e9, "steps": 3},
        "rollout": {} if case["temperature"] is None else {"temperature": case["temperature"]},
        "stages": [{"kind": case["kind"], "data": "rows.jsonl"}],
    }
    return parse(tree).stage(0)


@pytest.mark.parametrize("case", covering(AXES, is_possible), ids=title)
def test_a_step_of_a_stage_is_that_of_its_definition_whatever_the_rest_of_the_run_has(
    case: Case, tiny_model_dir: Path
) -> None:
    config, kind = config_of(case, tiny_model_dir), str(case["kind"])
    train, lessons = _as_trained(config).train, lessons_of(kind, tiny_model_dir)
    ours = Trainer(tiny_model_dir, config.model, train, 1.0, 1)
    groups = lessons
    if kind == "dpo":

        async def pushed() -> list[tuple[Sample, ...]]:
            before = await _margins(Here(ours), lessons)  # type: ignore[arg-type]
            return (await _preferred(Here(ours), lessons, before, BETA))[0]  # type: ignore[arg-type]

        groups = asyncio.run(pushed())
    ours.step(groups)
    wanted = definition(kind, tiny_model_dir, lessons, str(case["loss_mean"] or "tokens"))
    for name, tensor in ours.tensors().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", OWN_SETTINGS)
def test_a_stage_refuses_each_setting_that_is_not_its_own_by_name(kind: str) -> None:
    usual = TrainConfig().model_dump(mode="json")
    foreign = TrainConfig.model_fields.keys() - OWN_SETTINGS[kind] - {"loss"}
    assert {"advantage", "teacher", "kl"} <= foreign
    for name in sorted(foreign):
        stage = {"kind": kind, "data": "rows.jsonl", "train": {name: usual[name]}}
        with pytest.raises(ConfigError, match=rf"stages\.0\.train\.{name}: expected none in a stage of kind '{kind}'"):
            parse({"tasks": [{"name": "chain_sum"}], "stages": [stage]})


def test_imitation_without_stages_refuses_them_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    for loss, foreign in (("positive_only", {"advantage": "gae"}), ({"name": "dpo"}, {"minibatches": 2})):
        tree = {"run_dir": str(tmp_path), "tasks": [{"name": "chain_sum"}], "train": {"loss": loss, **foreign}}
        with pytest.raises(ConfigError, match=rf"train\.{next(iter(foreign))}: expected none"):
            run_supervised(parse(tree), tmp_path / "rows.jsonl")
        assert not any(tmp_path.iterdir())


def test_a_stage_of_reinforcement_keeps_every_setting_of_the_run(tiny_model_dir: Path) -> None:
    train = {"advantage": "gae", "kl": {"coefficient": 0.1}, "minibatches": 2}
    config = parse({"tasks": [{"name": "chain_sum"}], "train": train, "stages": [{"kind": "rl"}]})
    assert config.stage(0).train == config.train
    assert math.isclose(config.stage(0).train.kl.coefficient, 0.1)
