"""The optimizer, one update at a time: no number becomes infinite, and only matrices of weights decay."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import get_linear_schedule_with_warmup

from engine_models import saved
from shoal.config.training import TrainConfig
from shoal.model.loading import load_model
from shoal.trainer.messages import Adam
from shoal.trainer.optim import Optimizer, learning_rate

NUMBERS = st.one_of(
    st.floats(width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([1e19, -3e38, 1e-38, float("inf"), float("nan")]),
)


@given(
    gradients=st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=6),
    betas=st.tuples(*[st.sampled_from([0.0, 0.5, 0.9, 0.999, 1 - 2**-53])] * 2),
    most=st.sampled_from([1e-30, 1.0, 1e9]),
    decay=st.sampled_from([0.0, 0.999]),
    rate=st.sampled_from([1e-6, 1.0]),  # of the weights
    of_head=st.sampled_from([1e-6, 1.0]),
)
def test_every_update_leaves_finite_weights_and_moments_or_changes_nothing(
    gradients: list[list[float]], betas: tuple[float, float], most: float, decay: float, rate: float, of_head: float
) -> None:
    weight, head = nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(2, 2))
    section = {"lr": rate, "betas": betas, "max_grad_norm": most, "weight_decay": decay, "critic": {"lr": of_head}}
    optimizer = Optimizer(dict(weight.named_parameters()), TrainConfig.model_validate(section), {"head": head})
    for gradient in gradients:
        state = {"weight": weight.weight.detach(), "head": head.detach(), **optimizer.state()}
        before = {name: one.clone() for name, one in state.items()}
        weight.weight.grad, head.grad = (torch.tensor(gradient).view(2, 2) for _ in range(2))
        update = optimizer.update()
        after = {"weight": weight.weight.detach(), "head": head.detach(), **optimizer.state()}
        assert all(one.isfinite().all() for one in after.values())
        if not update.taken:
            assert all(torch.equal(one, before[name]) for name, one in after.items())
        elif all(map(abs, gradient)):
            assert update.lr == rate


@given(steps=st.integers(1, 30), warmup=st.integers(0, 20))
def test_a_linear_fall_is_that_of_transformers_whose_last_update_still_learns(steps: int, warmup: int) -> None:
    """Its warm-up begins at 0; ours begins one update later in it."""
    config = TrainConfig(lr=0.5, steps=steps + warmup, warmup_steps=warmup, lr_schedule="linear")
    rates = [learning_rate(config, update, None) for update in range(warmup, steps + warmup)]
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_linear_schedule_with_warmup(theirs, warmup, steps + warmup)
    wanted = [0.5 * schedule.lr_lambdas[0](update) for update in range(warmup, steps + warmup)]
    assert rates == pytest.approx(wanted)
    assert rates[-1] > 0


def test_biases_and_norms_are_never_decayed_whatever_their_shape(tmp_path: Path) -> None:
    """GPT-OSS has biases of experts, [expert, output]."""
    shape = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = load_model(saved("GptOss", tmp_path, **shape))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(dict(model.named_parameters()), TrainConfig(lr=0.5, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.data.add_(1.0)
    optimizer.update()
    decayed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name] + 1.0)}
    assert decayed == {name for name in before if name.endswith(("weight", "_proj", "sinks")) and before[name].ndim > 1}
    assert any(before[name].ndim > 1 for name in before.keys() - decayed)


def test_an_update_with_given_settings_is_that_of_torch() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    torchs = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = Optimizer({"weight": ours}, TrainConfig())
    adam = Adam(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
    for step in range(4):
        gradient = torch.sin(torch.arange(12.0) + step).view(3, 4)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        norm = nn.utils.clip_grad_norm_([theirs], 0.5)
        torchs.step()
        found, taken = optimizer.update_as(adam)
        assert taken
        assert found == pytest.approx(norm.item(), rel=1e-6)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_sensitivity_of_a_later_update_is_its_change_and_the_derivative_of_that(factor: float) -> None:
    """Only the larger gradient is shortened."""
    config, shift = TrainConfig(lr=0.5, weight_decay=0.0, max_grad_norm=1.0), 1e-2

    def second(moved: float = 0.0) -> tuple[torch.Tensor, float, torch.Tensor, torch.Tensor]:
        """Change by the second update, and what its sensitivity tells."""
        weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        optimizer, gradient = Optimizer({"weight": weight}, config), weight.detach().clone()
        weight.grad = gradient.flip(0) * 0.1
        optimizer.update()
        before, weight.grad = weight.detach().clone(), gradient * factor * (1 + moved)
        clip, told = optimizer.sensitivity({weight: weight.grad})
        optimizer.update()
        return weight.detach() - before, clip, *told[weight]

    change, clip, told, slope = second()
    torch.testing.assert_close(told, change, rtol=1e-4, atol=1e-6)
    assert (clip < 1) is (factor > 1)
    if clip == 1:
        difference = second(shift)[0] - second(-shift)[0]
        gradient = torch.linspace(-1, 1, 12).view(3, 4) * factor
        torch.testing.assert_close(slope * 2 * shift * gradient, difference, rtol=1e-3, atol=1e-5)
