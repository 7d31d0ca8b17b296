"""PPO's critic: its pure parts against float64 definitions, and in the trainer on a small model."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import row

import reference.critic as definition
from shoal.config import ModelConfig, parse
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.trainer import critic
from shoal.trainer.messages import StepStats
from shoal.trainer.optim import Optimizer
from shoal.trainer.step_stats import StepTotals
from shoal.trainer.trainer import Moment, Trainer
from shoal.types import Sample

numbers = st.floats(-3, 3)
rows_of_tokens = st.lists(st.lists(st.tuples(numbers, numbers), max_size=7), min_size=1, max_size=5)


@given(rows_of_tokens, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_advantages_and_returns_equal_the_definition_for_rows_of_any_length(
    rows: list[list[tuple[float, float]]], gae_lambda: float
) -> None:
    flat = [token for row in rows for token in row]
    row_T = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.long)
    reward_T = torch.tensor([reward for reward, _ in flat], dtype=torch.float64)
    value_T = torch.tensor([value for _, value in flat], dtype=torch.float64)
    got_T, return_T = critic.gae(reward_T, value_T, row_T, len(rows), gae_lambda)
    wanted = [
        definition.advantage([reward for reward, _ in row], [value for _, value in row], t, gae_lambda)
        for row in rows
        for t in range(len(row))
    ]
    torch.testing.assert_close(got_T, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(return_T, got_T + value_T)


@given(numbers, numbers, numbers, st.floats(0.05, 1))
def test_the_value_loss_and_its_gradient_equal_the_definition(
    value: float, before: float, wanted: float, clip: float
) -> None:
    if min(abs(abs(value - before) - clip), abs(abs(value - wanted) - abs(before - wanted))) < 1e-3:
        return  # the derivative jumps there
    value_T = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([x], dtype=torch.float64) for x in (before, wanted))
    loss_T = critic.value_loss(value_T, *others, clip)  # type: ignore[call-arg]
    loss_T.sum().backward()
    loss, slope = definition.value_loss(value, before, wanted, clip)
    assert loss_T.item() == pytest.approx(loss, abs=1e-9)
    assert value_T.grad is not None
    assert value_T.grad.item() == pytest.approx(slope, abs=1e-9)


def trainer(path: Path, **settings: object) -> Trainer:
    config = {"lr": 1e-2, "advantage": "gae", **settings}
    return Trainer(path, ModelConfig(device="cpu"), TrainConfig.model_validate(config), max_tokens=30)


def batch(seed: int, count: int = 8) -> list[list[Sample]]:
    """Groups whose reward, which is where the advantage will be, is 1 after one prompt and 0 after another."""
    rng = random.Random(seed)
    return [[row(rng, (7, 8) if i % 2 else (9, 3, 4), rng.randint(1, 6), float(i % 2)) for i in range(count)]]


def test_any_packing_and_any_order_of_the_rows_gives_the_same_weights(tiny_model_dir: Path) -> None:
    results = []
    for budget, order in ((10_000, 1), (16, 1), (40, -1)):
        ours = trainer(tiny_model_dir, tokens_per_microbatch=budget, lr=1e-3, critic={"gae_lambda": 0.9})
        for seed in range(2):
            ours.step([group[::order] for group in batch(seed)])
        results.append(torch.cat([t.flatten() for t in ours.tensors().values()]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-3, atol=2e-4)


def test_the_critic_learns_what_an_answer_is_worth(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir, lr=3e-3)
    stats = [ours.step(batch(seed)) for seed in range(25)]
    assert stats[0].explained_variance == pytest.approx(0.0, abs=1e-6)  # it gave 0 for everything
    assert stats[-1].explained_variance is not None
    assert stats[-1].explained_variance > 0.5
    assert stats[-1].value_loss < 0.5 * stats[0].value_loss


def test_a_resumed_critic_goes_on_bit_for_bit_and_engines_never_see_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    ours = trainer(tiny_model_dir)
    ours.step(batch(0))
    ours.save(tmp_path)
    resumed = trainer(tiny_model_dir)
    resumed.load(tmp_path)
    wanted, got = ours.step(batch(1)), resumed.step(batch(1))
    assert replace(got, seconds=0.0) == replace(wanted, seconds=0.0)
    assert not any("value_head" in name for name in ours.tensors())
    assert all(torch.equal(a, resumed.tensors()[name]) for name, a in ours.tensors().items())


def test_kl_in_the_reward_lowers_the_returns(tiny_model_dir: Path) -> None:
    def first(coefficient: float) -> StepStats:
        ours = trainer(
            tiny_model_dir, kl={"coefficient": coefficient, "where": "reward", "estimator": "k2"}, advantage="gae"
        )
        return ours.step(batch(0))

    # The critic gives 0, so the value loss is half the mean square of the returns.
    assert first(1.0).value_loss != pytest.approx(first(1e-9).value_loss, rel=1e-2)


def test_late_tokens_cannot_be_masked_with_a_critic() -> None:
    with pytest.raises(ConfigError, match=r"asynchrony\.late: expected 'drop' or 'train'"):
        parse(
            {
                "tasks": [{"name": "chain_sum"}],
                "train": {"advantage": "gae"},
                "asynchrony": {"late": "mask_tokens"},
            }
        )


def test_a_critic_trains_on_one_rank_only() -> None:
    with pytest.raises(ConfigError, match=r"train\.ranks: expected 1 with train.advantage = 'gae'"):
        parse({"tasks": [{"name": "chain_sum"}], "train": {"advantage": "gae", "ranks": 2}})


def test_the_critic_learns_at_its_own_rate_and_the_schedule_moves_both() -> None:
    model, head = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    config = TrainConfig.model_validate(
        {"lr": 1e-3, "steps": 2, "lr_schedule": "linear", "critic": {"lr": 1e-1}, "advantage": "gae"}
    )
    optimizer = Optimizer(dict(model.named_parameters()), config, {"value_head.weight": head.weight})
    for share in (1.0, 0.5):
        before = [model.weight.detach().clone(), head.weight.detach().clone()]
        for parameter in (model.weight, head.weight):
            parameter.grad = torch.ones_like(parameter)
        assert optimizer.update().lr == pytest.approx(1e-3 * share)
        # Adam's step on a constant gradient is the rate itself.
        for parameter, old, rate in zip((model.weight, head.weight), before, (1e-3, 1e-1), strict=True):
            torch.testing.assert_close(old - parameter, torch.full_like(old, rate * share), rtol=1e-3, atol=1e-6)


def test_a_micro_batch_that_stands_for_no_rows_counts_in_no_statistic_of_the_critic(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir)
    minibatch = ours.minibatch([one for group in batch(0) for one in group])
    valued = tuple(map(ours._with_gae, minibatch.batches))
    idle = replace(valued[0], idle=True, weight_N=torch.zeros_like(valued[0].weight_N))
    losses = []
    for batches in (valued, (*valued, idle)):
        totals = StepTotals("cpu")
        ours.accumulate(replace(minibatch, batches=batches), totals, Moment(), fresh=True)
        losses.append(totals.stats([], [minibatch], 0.0, "").value_loss)
    assert losses[0] > 0
    assert losses[1] == pytest.approx(losses[0])
