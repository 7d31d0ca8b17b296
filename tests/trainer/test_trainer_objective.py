"""What is around a loss: means, reference model, entropy bonus, proximal weights; in the trainer, on a small model."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import losses as definitions
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError, TrainerError
from shoal.model.packed import packed_logprobs
from shoal.trainer.packing import Size, loss_mean, size_of
from shoal.trainer.step_stats import StepTotals
from shoal.trainer.trainer import Moment, Trainer
from shoal.types import Sample

BUDGET_TOKENS = 30
LOSSES = [
    {"name": "grpo"},
    {"name": "decoupled", "weight_level": "sequence", "over_cap": "band"},
    {"name": "double_sided"},
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    {"name": "cispo"},
    {"name": "reinforce", "weight_level": "sequence"},
    {"name": "soft_adaptive"},
    {"name": "positive_only"},
]


def row(rng: random.Random, prompt: Sequence[int], answer: int, advantage: float) -> Sample:
    """A prompt and `answer` random tokens that were drawn with about the logprobs of the tiny model."""
    p = len(prompt)
    return Sample(
        tokens=(*prompt, *(rng.randrange(1, 60) for _ in range(answer))),
        mask=(0,) * p + (1,) * answer,
        logprobs=(0.0,) * p + tuple(-4.3 - 0.6 * rng.random() for _ in range(answer)),
        versions=(-1,) * p + (3,) * answer,
        advantages=(0.0,) * p + (advantage,) * answer,
    )


def batch(seed: int, answers: Sequence[int] = (1, 5, 9, 4)) -> list[Sample]:
    rng = random.Random(seed)
    return [row(rng, (7, 8, 9)[: 1 + i % 3], n, 1.0 if i % 2 else -0.5) for i, n in enumerate(answers)]


def trainer(path: Path, **config: object) -> Trainer:
    """Whose weights have moved away from those at `path`, its reference."""
    ours = Trainer(path, ModelConfig(device="cpu"), TrainConfig.model_validate(config), max_tokens=BUDGET_TOKENS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in ours.model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.02)
    return ours


def gradient(
    ours: Trainer, *parts: Sequence[Sample], whole: Size | None = None, version: int = 4
) -> tuple[Tensor, float]:
    """Of the loss of one update over all parts, each accumulated by itself; and that loss.

    `whole` is the size of the update when there are more parts elsewhere.
    """
    totals = StepTotals("cpu")
    whole = whole or size_of([row for part in parts for row in part])
    minibatches = [ours.minibatch(part, whole) for part in parts]
    for minibatch in minibatches:
        ours.accumulate(minibatch, totals, Moment(version), fresh=True)
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in ours.model.parameters()]
    result = torch.cat([g.flatten() for g in zeros])
    ours.model.zero_grad()
    return result, totals.stats([], minibatches, 0.0, "").loss * len(minibatches)


@settings(max_examples=40)
@given(
    loss=st.sampled_from(LOSSES),
    mean=st.sampled_from([None, "tokens", "rows", "budget"]),
    kl=st.sampled_from([{}, {"coefficient": 0.1, "where": "loss"}, {"coefficient": 0.1, "where": "reward"}]),
    entropy_bonus=st.sampled_from([0.0, 0.1]),
    answers=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    budget=st.integers(16, 60),
    seed=st.integers(0, 99),
)
def test_any_packing_and_any_split_gives_the_same_loss_and_gradient_of_every_objective(
    tiny_model_dir: Path,
    loss: dict[str, object],
    mean: str | None,
    kl: dict[str, object],
    entropy_bonus: float,
    answers: list[int],
    budget: int,
    seed: int,
) -> None:
    config = {"loss": loss, "loss_mean": mean, "kl": kl, "entropy_bonus": entropy_bonus}
    rows = batch(seed, answers)
    wanted, wanted_loss = gradient(trainer(tiny_model_dir, tokens_per_microbatch=100_000, **config), rows)
    shuffled, cut = random.Random(seed).sample(rows, len(rows)), seed % (len(rows) + 1)
    pieces = trainer(tiny_model_dir, tokens_per_microbatch=budget, **config)
    got, got_loss = gradient(pieces, shuffled[:cut], shuffled[cut:])
    assert got_loss == pytest.approx(wanted_loss, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("mean", "weights"),
    [
        ("tokens", [1 / 19] * 4),
        ("rows", [1 / 4 / 1, 1 / 4 / 5, 1 / 4 / 9, 1 / 4 / 4]),
        ("budget", [1 / 4 / BUDGET_TOKENS] * 4),
    ],
)
def test_the_loss_is_the_mean_that_the_config_names(tiny_model_dir: Path, mean: str, weights: list[float]) -> None:
    rows = batch(1)
    ours = trainer(tiny_model_dir, loss={"name": "positive_only"}, loss_mean=mean)
    scored = ours.logprobs([row.tokens for row in rows])
    wanted = 0.0
    for row, logprobs, weight in zip(rows, scored, weights, strict=True):
        wanted -= weight * sum(max(a, 0.0) * lp for a, lp in zip(row.advantages[1:], logprobs, strict=True))
    assert gradient(ours, rows)[1] == pytest.approx(wanted, rel=1e-5)


def test_gspo_means_over_rows_and_others_over_tokens_unless_told_otherwise(tiny_model_dir: Path) -> None:
    for loss, mean in (("gspo", "rows"), ("grpo", "tokens")):
        default = trainer(tiny_model_dir, loss={"name": loss})
        named = trainer(tiny_model_dir, loss={"name": loss}, loss_mean=mean)
        assert gradient(default, batch(2))[1] == gradient(named, batch(2))[1]


def test_a_mean_over_the_budget_needs_the_budget(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(loss_mean="budget"))


def test_kl_in_the_loss_adds_its_mean_and_is_reported(tiny_model_dir: Path) -> None:
    rows = batch(3)
    plain = trainer(tiny_model_dir)
    ours = trainer(tiny_model_dir, kl={"coefficient": 0.5, "estimator": "k2", "where": "loss"})
    reference = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig())
    tokens = [row.tokens for row in rows]
    d = [
        a - b
        for row, moved, kept in zip(rows, ours.logprobs(tokens), reference.logprobs(tokens), strict=True)
        for a, b, m in zip(moved, kept, row.mask[1:], strict=True)
        if m
    ]
    wanted = sum(x * x / 2 for x in d) / len(d)
    assert gradient(ours, rows)[1] == pytest.approx(gradient(plain, rows)[1] + 0.5 * wanted, rel=1e-4)
    assert ours.step([rows]).kl == pytest.approx(wanted, rel=1e-4)
    assert plain.step([rows]).kl == 0.0


def test_kl_in_the_reward_takes_what_is_still_to_come_off_each_advantage(tiny_model_dir: Path) -> None:
    rows = batch(4)
    reference = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig())
    less = []
    for row, scored in zip(rows, reference.logprobs([row.tokens for row in rows]), strict=True):
        d = [m * (behav - ref) for m, behav, ref in zip(row.mask, row.logprobs, (0.0, *scored), strict=True)]
        kept = [m * (a - 0.5 * sum(d[i:])) for i, (m, a) in enumerate(zip(row.mask, row.advantages, strict=True))]
        less.append(replace(row, advantages=tuple(kept)))
    ours = trainer(tiny_model_dir, kl={"coefficient": 0.5, "estimator": "k1", "where": "reward"})
    got, wanted = gradient(ours, rows), gradient(trainer(tiny_model_dir), less)
    assert got[1] == pytest.approx(wanted[1], rel=1e-4)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-3, atol=1e-5)


def test_reinforce_pp_takes_the_penalty_off_before_it_normalises(tiny_model_dir: Path) -> None:
    rows = batch(4)
    reference = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig())
    scored = reference.logprobs([row.tokens for row in rows])
    kl = [
        [behav - ref for m, behav, ref in zip(row.mask[1:], row.logprobs[1:], logp, strict=True) if m]
        for row, logp in zip(rows, scored, strict=True)
    ]
    wanted = definitions.reinforce_pp([row.advantages[-1] for row in rows], kl, 0.5)
    normalised = [
        replace(row, advantages=(*(0.0 for m in row.mask if not m), *values))
        for row, values in zip(rows, wanted, strict=True)
    ]
    section = {"coefficient": 0.5, "estimator": "k1", "where": "reward"}
    for minibatches in (1, 2):  # the whole step is normalised together
        ours = trainer(tiny_model_dir, lr=1e-3, advantage="batch", kl=section, minibatches=minibatches)
        plain = trainer(tiny_model_dir, lr=1e-3, minibatches=minibatches)
        groups = [rows[:2], rows[2:]]
        found = ours.step(groups)
        assert found.loss == pytest.approx(plain.step([normalised[:2], normalised[2:]]).loss, rel=1e-4, abs=1e-6)
        for name, tensor in plain.tensors().items():
            torch.testing.assert_close(ours.tensors()[name], tensor, rtol=1e-2, atol=1e-4)


def test_rows_without_advantage_are_trained_when_there_is_a_regulariser(tiny_model_dir: Path) -> None:
    rows = [replace(row, advantages=(0.0,) * len(row.tokens)) for row in batch(5)]
    for config in ({"kl": {"coefficient": 0.1}}, {"entropy_bonus": 0.1}):
        stats = trainer(tiny_model_dir, lr=1e-3, **config).step([rows])
        assert stats.updates == 1
        assert stats.update_norm > 0
    assert trainer(tiny_model_dir, lr=1e-3).step([rows]).updates == 0


def test_the_entropy_bonus_and_its_gradient_equal_the_definition(tiny_model_dir: Path) -> None:
    """Over the whole vocabulary: the sum of -p log p at the one trained token."""
    prompt = (7, 8, 9)
    only = [replace(row(random.Random(0), prompt, 1, 0.0))]
    ours = trainer(tiny_model_dir, entropy_bonus=0.3)
    got, got_loss = gradient(ours, only)
    rows = [[*prompt, token] for token in range(ours.model.config.vocab_size)]
    logp_T = packed_logprobs(ours.model, torch.tensor(rows).flatten(), [4] * len(rows))
    logp_V = logp_T[3::4]
    wanted_loss = 0.3 * (logp_V.exp() * logp_V).sum()
    wanted_loss.backward()
    wanted = torch.cat([g.flatten() for p in ours.model.parameters() if (g := p.grad) is not None])
    assert got_loss == pytest.approx(wanted_loss.item(), rel=1e-5)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)
    assert wanted.abs().max() > 1e-3


def test_log_linear_proximal_weights_of_a_first_update_are_the_recomputed_ones(tiny_model_dir: Path) -> None:
    rows = batch(6)
    ours = trainer(tiny_model_dir, loss={"name": "decoupled", "behaviour_correction": "log_linear"})
    exact = trainer(tiny_model_dir, loss={"name": "decoupled"})
    for version in (3, 9):
        torch.testing.assert_close(gradient(ours, rows, version=version)[0], gradient(exact, rows)[0])
    with pytest.raises(TrainerError, match="needs the version"):
        ours.step([rows])


def test_soft_adaptive_counts_every_row_the_same_as_published() -> None:
    assert loss_mean(TrainConfig.model_validate({"loss": {"name": "soft_adaptive"}})) == "rows"


@pytest.mark.parametrize("budget", [16, 1000])
@pytest.mark.parametrize("bound", [1e-3, 0.05, 10.0])
def test_m2po_masks_the_outliers_of_the_whole_update(tiny_model_dir: Path, budget: int, bound: float) -> None:
    config = {"loss": {"name": "m2po", "clip_high": bound}, "tokens_per_microbatch": budget}
    ours, rows = trainer(tiny_model_dir, **config), batch(3)
    logp = [torch.tensor(x).double() for row, found in zip(rows, ours.logprobs([r.tokens for r in rows]), strict=True)
            for x in (0.0, *found)]  # fmt: skip
    behav, advantage, mask = (
        [x for row in rows for x in getattr(row, name)] for name in ("logprobs", "advantages", "mask")
    )
    wanted = definitions.m2po(logp, behav, advantage, mask, bound) / sum(mask)
    found = ours.step([rows], version=4)
    assert found.loss == pytest.approx(float(wanted), rel=1e-4)
    assert (found.masked_share > 0) == (bound < 10)
