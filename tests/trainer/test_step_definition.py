"""One step under a covering array of settings has the gradient of its float64 definition: reinforcement, distillation.

Stages of imitation and preference have theirs in tests/run/test_stage_settings.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from test_trainer_objective import BUDGET_TOKENS, batch
from torch import Tensor, nn

from engine_models import plain
from pairwise import Case, covering, title
from reference import losses as definitions
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.trainer.optim import Update
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

CLIP, DUAL, CAP, LEFT = (0.2, 0.3), 3.0, 2.0, 0.5
AXES = {
    "kind": ["rl", "distillation"],
    "loss": ["grpo", "gspo", "cispo", "reinforce", "soft_adaptive", "positive_only"],
    "mean": [None, "tokens", "rows", "budget"],
    "kl": [None, ("loss", "k1"), ("loss", "k2"), ("loss", "k3"), ("reward", "k1")],
    "advantage": ["group", "batch"],
    "entropy_bonus": [0.0, 0.1],
    "temperature": [1.0, 0.7],
    "tokens_per_microbatch": [16, 1000],
    "checkpointing": [False, True],
}


def is_possible(case: Case) -> bool:
    """Whether a run could have these settings; the mean of a batch is the trainer's only where KL is in the reward."""
    if case["kind"] == "distillation":
        return case["kl"] is None and case["advantage"] == "group"
    return case["advantage"] == "group" or case["kl"] == ("reward", "k1")


LOSSES: dict[str, dict[str, object]] = {
    "grpo": {"clip_low": CLIP[0], "clip_high": CLIP[1], "dual_clip": DUAL},
    "gspo": {"clip_low": CLIP[0], "clip_high": CLIP[1], "dual_clip": DUAL},
    "cispo": {"weight_cap": CAP},
    "reinforce": {"weight_cap": CAP, "weight_level": "sequence", "over_cap": "clamp"},
    "soft_adaptive": {},
    "positive_only": {},
}


def config_of(case: Case, model: Path) -> TrainConfig:
    train: dict[str, object] = {
        "loss": {"name": case["loss"], **LOSSES[str(case["loss"])]},
        "lr": 1e-3,
        "max_grad_norm": 1e9,
        **{name: case[name] for name in ("entropy_bonus", "tokens_per_microbatch")},
    }
    if case["mean"] is not None:
        train["loss_mean"] = case["mean"]
    if case["advantage"] == "batch":
        train["advantage"] = "batch"
    if isinstance(case["kl"], tuple):
        where, estimator = case["kl"]
        train["kl"] = {"coefficient": LEFT, "where": where, "estimator": estimator}
    if case["kind"] == "distillation":
        train["teacher"] = str(model)
    return TrainConfig.model_validate(train)


class Watched(Trainer):
    """Trainer whose last gradient stays readable."""

    def take_update(self) -> Update:
        self.gradient = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return super().take_update()


def moved(model: nn.Module) -> None:
    """Moves weights away from those of the reference, alike for every dtype."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.02 * torch.randn(p.shape, generator=generator)).to(p.dtype))


def logprobs(model: nn.Module, row: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs of the trained tokens and the entropies in their places, float64."""
    tokens, trained = torch.tensor(row.tokens), torch.tensor(row.mask[1:]).bool()
    every = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)[trained]
    return every.gather(-1, tokens[1:, None][trained])[:, 0], -(every.exp() * every).sum(-1)


def advantages(case: Case, rows: Sequence[Sample], ref: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each trained token, after the teacher's word or the penalty."""
    far = [[b - r for b, r in zip(sampled(row), known, strict=True)] for row, known in zip(rows, ref, strict=True)]
    rewards = [row.advantages[-1] for row in rows]
    if case["kind"] == "distillation":
        return [[-one for one in row] for row in far]
    if case["advantage"] == "batch":
        return definitions.reinforce_pp(rewards, far, LEFT)
    left = LEFT if case["kl"] == ("reward", "k1") else 0.0
    return [[reward - left * sum(row[t:]) for t in range(len(row))] for reward, row in zip(rewards, far, strict=True)]


def sampled(row: Sample) -> list[float]:
    """Logprobs with which the trained tokens were drawn."""
    return [logprob for logprob, m in zip(row.logprobs, row.mask, strict=True) if m]


def loss_of(name: str) -> Callable[[list[Tensor], list[float], list[float]], Tensor]:
    """Sum over the trained tokens of a row."""

    def summed(logp: list[Tensor], behav: list[float], advantage: list[float]) -> Tensor:
        given = logp, behav, advantage, [1] * len(logp)
        match name:
            case "grpo":
                return definitions.grpo(*given, *CLIP, DUAL)
            case "gspo":
                return definitions.gspo(*given, [0] * len(logp), CLIP, DUAL)
            case "cispo":
                return definitions.cispo(*given, CAP)
            case "reinforce":
                return definitions.reinforce(*given, [0] * len(logp), CAP, "sequence", "clamp")
            case "soft_adaptive":
                return definitions.soft_adaptive(*given, 1.0, 1.05)
        return definitions.positive_only(logp, advantage, [1] * len(logp))

    return summed


def definition(case: Case, path: Path, rows: Sequence[Sample]) -> dict[str, Tensor]:
    """Gradient of the loss, by transformers' own forward."""
    ours, reference, temperature = plain(path).double(), plain(path).double(), float(str(case["temperature"]))
    moved(ours)
    with torch.no_grad():
        ref = [logprobs(reference, row, temperature)[0].tolist() for row in rows]
    mean = case["mean"] or ("rows" if case["loss"] in ("gspo", "soft_adaptive") else "tokens")
    tokens, total = sum(map(len, ref)), torch.zeros((), dtype=torch.float64)
    for row, known, advantage in zip(rows, ref, advantages(case, rows, ref), strict=True):
        logp, entropy = logprobs(ours, row, temperature)
        summed = loss_of(str(case["loss"]))(list(logp), sampled(row), advantage)
        if isinstance(case["kl"], tuple) and case["kl"][0] == "loss":
            summed = summed + LEFT * definitions.kl(list(logp), known, [1] * len(known), case["kl"][1])
        summed = summed - float(str(case["entropy_bonus"])) * entropy.sum()
        whole = {"tokens": tokens, "rows": len(rows) * len(known), "budget": len(rows) * BUDGET_TOKENS}[str(mean)]
        total = total + summed / whole
    total.backward()
    return {name: p.grad.float() for name, p in ours.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", covering(AXES, is_possible), ids=title)
def test_a_step_has_the_gradient_of_its_definition_whatever_settings_come_together(
    case: Case, tiny_model_dir: Path
) -> None:
    rows, model = batch(7), ModelConfig(device="cpu", gradient_checkpointing=bool(case["checkpointing"]))
    config, temperature = config_of(case, tiny_model_dir), float(str(case["temperature"]))
    ours = Watched(tiny_model_dir, model, config, temperature, BUDGET_TOKENS)
    moved(ours.model)
    assert ours.step([rows[:2], rows[2:]]).updates == 1
    wanted = definition(case, tiny_model_dir, rows)
    assert ours.gradient.keys() == wanted.keys()
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    assert largest > 1e-3
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours.gradient[name], tensor, rtol=1e-3, atol=1e-4 * largest)
