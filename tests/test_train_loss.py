"""Each loss against its definition in tests/reference/losses.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference import losses as reference
from shoal.config import DecoupledLoss, DoubleSidedLoss, GRPOLoss, LossConfig
from shoal.train.loss import Streams, token_loss


@dataclass(frozen=True)
class Case:
    """Streams as plain lists; `theta` are the logprobs under the trained weights."""

    theta: list[float]
    prox: list[float]
    behav: list[float]
    advantage: list[float]
    mask: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One-token answers, near and extreme ratios, and NaN wherever the mask is 0."""
    n = draw(st.integers(1, 10))
    mask = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    near = st.floats(-0.5, 0.5)
    far = st.floats(-200.0, 200.0)
    streams: dict[str, list[float]] = {"theta": [], "prox": [], "behav": [], "advantage": []}
    for m in mask:
        theta = draw(st.floats(-20.0, -1e-4))
        values = {
            "theta": theta,
            "prox": theta + draw(near | far),
            "behav": theta + draw(near | far),
            "advantage": draw(st.floats(-3, 3)),
        }
        for name, value in values.items():
            streams[name].append(value if m else math.nan)
    return Case(mask=mask, **streams)


def ours(case: Case, config: LossConfig, dtype: torch.dtype = torch.float64) -> tuple[float, list[float]]:
    """Summed loss and its gradient by logp."""
    logp_T = torch.tensor(case.theta, dtype=dtype, requires_grad=True)
    prox_T, behav_T, advantage_T = (torch.tensor(x, dtype=dtype) for x in (case.prox, case.behav, case.advantage))
    terms = token_loss(Streams(logp_T, prox_T, behav_T, advantage_T, torch.tensor(case.mask) == 1), config)
    loss = terms.loss_T.sum()
    loss.backward()
    assert logp_T.grad is not None
    return loss.item(), logp_T.grad.tolist()


def defined(case: Case, definition: Callable[[list[Tensor]], Tensor]) -> tuple[float, list[float]]:
    """The same from a definition."""
    logp = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in case.theta]
    loss = definition(logp)
    if loss.requires_grad:
        loss.backward()
    return loss.item(), [0.0 if x.grad is None else x.grad.item() for x in logp]


def assert_equal(got: tuple[float, list[float]], wanted: tuple[float, list[float]]) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-6, abs=1e-6)
    assert got[1] == pytest.approx(wanted[1], rel=1e-6, abs=1e-6)


@given(cases())
def test_grpo_and_its_gradient_equal_the_definition(case: Case) -> None:
    wanted = defined(case, lambda logp: reference.grpo(logp, case.behav, case.advantage, case.mask, 0.2, 0.28))
    assert_equal(ours(case, GRPOLoss(clip_low=0.2, clip_high=0.28)), wanted)


@given(cases(), st.sampled_from(["clamp", "mask"]), st.booleans())
def test_decoupled_and_its_gradient_equal_the_definition(case: Case, over_cap: str, correction: bool) -> None:
    config = DecoupledLoss(
        clip_low=0.2,
        clip_high=0.28,
        weight_cap=5.0,
        over_cap="clamp" if over_cap == "clamp" else "mask",
        behaviour_correction="on" if correction else "off_and_biased",
    )
    wanted = defined(
        case,
        lambda logp: reference.decoupled(
            logp, case.prox, case.behav, case.advantage, case.mask, 0.2, 0.28, 5.0, over_cap, correction
        ),
    )
    assert_equal(ours(case, config), wanted)


@given(cases())
def test_double_sided_and_its_gradient_equal_the_definition(case: Case) -> None:
    wanted = defined(case, lambda logp: reference.double_sided(logp, case.behav, case.advantage, case.mask, 0.3, 5.0))
    assert_equal(ours(case, DoubleSidedLoss(band_low=0.3, band_high=5.0)), wanted)


@pytest.mark.parametrize("logp", [math.log(0.9), math.log(0.5), math.log(0.3), math.log(0.01)])
def test_literal_autodiff_of_double_sided_has_the_wrong_sign_below_1_over_e_and_ours_has_not(logp: float) -> None:
    case = Case(theta=[logp], prox=[logp], behav=[logp], advantage=[1.0], mask=[1])
    (gradient,) = ours(case, DoubleSidedLoss())[1]
    literal = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    reference.double_sided_literal(literal, logp, 1.0).backward()
    assert literal.grad is not None
    # A rewarded token must become likelier: descending the loss must raise logp.
    assert gradient < 0
    assert (literal.grad.item() < 0) == (logp > -1)


@pytest.mark.parametrize("config", [GRPOLoss(), DecoupledLoss(), DecoupledLoss(over_cap="mask"), DoubleSidedLoss()])
@pytest.mark.parametrize("gap", [-300.0, -60.0, 60.0, 300.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite_in_float32(config: LossConfig, gap: float, advantage: float) -> None:
    case = Case(
        theta=[-1.0, -1.0], prox=[-1.0, -1.0 + gap], behav=[-1.0 + gap] * 2, advantage=[advantage] * 2, mask=[1, 1]
    )
    loss, gradient = ours(case, config, torch.float32)
    assert all(math.isfinite(x) for x in (loss, *gradient))


def test_shares_count_clipped_masked_and_capped_tokens() -> None:
    ones = torch.ones(4)
    theta = torch.tensor([0.0, 1.0, 3.0, -3.0]) - 4.0
    streams = Streams(theta, theta, ones * -4.0, ones, torch.tensor([True, True, True, False]))
    clipped = token_loss(streams, GRPOLoss()).clipped_T
    masked = token_loss(streams, DoubleSidedLoss(band_low=0.3, band_high=5.0)).masked_T
    capped = token_loss(streams, DecoupledLoss(weight_cap=5.0)).capped_T
    left_out = token_loss(streams, DecoupledLoss(weight_cap=5.0, over_cap="mask")).masked_T
    assert clipped.tolist() == [False, True, True, False]
    assert masked.tolist() == capped.tolist() == left_out.tolist() == [False, False, True, False]


def test_decoupled_weight_is_on_unless_the_config_says_otherwise_in_words() -> None:
    case = Case(theta=[-1.0], prox=[-1.0], behav=[-2.0], advantage=[1.0], mask=[1])
    assert ours(case, DecoupledLoss())[0] == pytest.approx(-math.e)
    assert ours(case, DecoupledLoss(behaviour_correction="off_and_biased"))[0] == pytest.approx(-1.0)
