"""Each loss against its definition in tests/reference/losses.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from reference import losses as reference
from shoal.config import Section
from shoal.config.training import (
    LOSSES,
    CISPOLoss,
    DecoupledLoss,
    DoubleSidedLoss,
    DPPOKLLoss,
    DPPOTVLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    LossConfig,
    M2POLoss,
    OwnLoss,
    PositiveOnlyLoss,
    ReinforceLoss,
    SoftAdaptiveLoss,
    TrainConfig,
)
from shoal.errors import ConfigError
from shoal.trainer.advantage import advantages
from shoal.trainer.loss import kl, log_linear_prox, own_loss, square_bound, to_go, token_loss
from shoal.trainer.packing import Size, token_weight
from shoal.trainer.streams import Streams
from shoal.trainer.trainer import Moment

ALL_LOSSES: list[LossConfig] = [
    GRPOLoss(),
    DecoupledLoss(),
    DecoupledLoss(over_cap="mask"),
    DecoupledLoss(weight_level="sequence", over_cap="band"),
    DoubleSidedLoss(),
    GSPOLoss(),
    GMPOLoss(),
    DPPOTVLoss(),
    DPPOKLLoss(),
    M2POLoss(),
    CISPOLoss(),
    ReinforceLoss(),
    ReinforceLoss(weight_level="sequence", over_cap="mask"),
    SoftAdaptiveLoss(),
    PositiveOnlyLoss(),
]


@dataclass(frozen=True)
class Case:
    """Streams as plain lists; `theta` are the logprobs under the trained weights, `rows` which row a token is of."""

    theta: list[float]
    prox: list[float]
    behav: list[float]
    advantage: list[float]
    mask: list[int]
    rows: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows of no, one and more tokens, of which those with mask 0 are not trained; near and extreme ratios."""
    rows = [row for row, n in enumerate(draw(st.lists(st.integers(0, 6), max_size=4))) for _ in range(n)]
    n = len(rows)
    mask = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    near = st.floats(-0.5, 0.5)
    far = st.floats(-200.0, 200.0)
    streams: dict[str, list[float]] = {"theta": [], "prox": [], "behav": [], "advantage": []}
    for _ in mask:
        theta = draw(st.floats(-20.0, -1e-4))
        values = {
            "theta": theta,
            "prox": theta + draw(near | far),
            "behav": theta + draw(near | far),
            "advantage": draw(st.floats(-3, 3)),
        }
        for name, value in values.items():
            streams[name].append(value)
    return Case(mask=mask, rows=rows, **streams)


def ours(
    case: Case, config: LossConfig, dtype: torch.dtype = torch.float64, bound: float = math.inf
) -> tuple[float, list[float]]:
    """Summed loss and its gradient by logp."""
    kept = [i for i, trained in enumerate(case.mask) if trained]

    def of_trained(values: list[float]) -> Tensor:
        return torch.tensor([values[i] for i in kept], dtype=dtype)

    logp_T = of_trained(case.theta).requires_grad_()
    row_T, rows = torch.tensor([case.rows[i] for i in kept], dtype=torch.long), max(case.rows, default=-1) + 1
    prox_T, behav_T, advantage_T = map(of_trained, (case.prox, case.behav, case.advantage))
    loss = token_loss(Streams(logp_T, prox_T, behav_T, advantage_T, row_T, rows, bound), config).loss_T.sum()
    loss.backward()
    assert logp_T.grad is not None
    gradient = dict(zip(kept, logp_T.grad.tolist(), strict=True))
    return loss.item(), [gradient.get(i, 0.0) for i in range(len(case.mask))]


def defined(case: Case, definition: Callable[[list[Tensor]], Tensor]) -> tuple[float, list[float]]:
    """The same from a definition."""
    logp = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in case.theta]
    loss = definition(logp)
    if loss.requires_grad:
        loss.backward()
    return loss.item(), [0.0 if x.grad is None else x.grad.item() for x in logp]


def assert_equal(got: tuple[float, list[float]], wanted: tuple[float, list[float]]) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-9, abs=1e-9)
    assert got[1] == pytest.approx(wanted[1], rel=1e-9, abs=1e-9)


@given(cases())
def test_grpo_and_its_gradient_equal_the_definition(case: Case) -> None:
    wanted = defined(case, lambda logp: reference.grpo(logp, case.behav, case.advantage, case.mask, 0.2, 0.28, 3.0))
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
            logp, case.prox, case.behav, case.advantage, case.mask, 0.2, 0.28, 5.0, over_cap, 3.0, correction
        ),
    )
    assert_equal(ours(case, config), wanted)


@given(cases())
def test_double_sided_and_its_gradient_equal_the_definition(case: Case) -> None:
    wanted = defined(case, lambda logp: reference.double_sided(logp, case.behav, case.advantage, case.mask, 0.3, 5.0))
    assert_equal(ours(case, DoubleSidedLoss(clip_low=0.3, clip_high=5.0)), wanted)


@given(cases())
def test_a_bound_of_0_is_no_bound(case: Case) -> None:
    streams, clip = (case.behav, case.advantage, case.mask), (0.2, 0.28)
    free = defined(case, lambda logp: reference.grpo(logp, *streams, *clip, math.inf))
    assert_equal(ours(case, GRPOLoss(dual_clip=0)), free)
    uncapped = defined(
        case, lambda logp: reference.decoupled(logp, case.prox, *streams, *clip, math.inf, "clamp", math.inf)
    )
    assert_equal(ours(case, DecoupledLoss(weight_cap=0, dual_clip=0)), uncapped)


over_caps: st.SearchStrategy[Literal["clamp", "mask", "band"]] = st.sampled_from(["clamp", "mask", "band"])


@given(cases(), st.sampled_from([2.0, 5.0, 100.0]), over_caps)
def test_decoupled_by_row_and_its_gradient_equal_the_definition(
    case: Case, cap: float, over_cap: Literal["clamp", "mask", "band"]
) -> None:
    config = DecoupledLoss(weight_cap=cap, weight_level="sequence", over_cap=over_cap)
    bounds, over = (1 / cap if over_cap == "band" else 0.0, cap), "clamp" if over_cap == "clamp" else "mask"
    streams = (case.prox, case.behav, case.advantage, case.mask, case.rows)
    wanted = defined(case, lambda logp: reference.decoupled_by_row(logp, *streams, (0.2, 0.28), bounds, over, 3.0))
    assert_equal(ours(case, config), wanted)


@given(cases(), st.floats(1.1, 5.0))
def test_decoupled_masked_outside_a_band_is_icepop(case: Case, beta: float) -> None:
    config = DecoupledLoss(weight_cap=beta, over_cap="band", clip_high=0.2)
    streams = (case.prox, case.behav, case.advantage, case.mask)
    assert_equal(
        ours(case, config), defined(case, lambda logp: reference.icepop(logp, *streams, (0.2, 0.2), beta, 3.0))
    )


@given(cases(), st.sampled_from([(3e-4, 4e-4), (0.2, 0.3)]))
def test_gspo_and_its_gradient_equal_the_definition(case: Case, clip: tuple[float, float]) -> None:
    streams = (case.behav, case.advantage, case.mask, case.rows)
    config = GSPOLoss(clip_low=clip[0], clip_high=clip[1])
    assert_equal(ours(case, config), defined(case, lambda logp: reference.gspo(logp, *streams, clip, 3.0)))


@given(cases(), st.sampled_from([(0.4, 0.4), (0.1, 2.0)]))
def test_gmpo_and_its_gradient_equal_the_definition(case: Case, clip: tuple[float, float]) -> None:
    streams, config = (case.behav, case.advantage, case.mask, case.rows), GMPOLoss(clip_low=clip[0], clip_high=clip[1])
    assert_equal(ours(case, config), defined(case, lambda logp: reference.gmpo(logp, *streams, clip)))


@given(cases(), st.sampled_from(["tv", "kl"]), st.sampled_from([(0.15, 0.15, 20.0), (0.01, 0.3, 0.0)]))
def test_dppo_and_its_gradient_equal_the_definition(
    case: Case, divergence: str, bounds: tuple[float, float, float]
) -> None:
    low, high, cap = bounds
    case = replace(case, behav=[min(logp, -1e-4) for logp in case.behav])  # probabilities
    config = (DPPOTVLoss if divergence == "tv" else DPPOKLLoss)(clip_low=low, clip_high=high, weight_cap=cap)
    streams = (case.behav, case.advantage, case.mask)
    wanted = defined(case, lambda logp: reference.dppo(logp, *streams, divergence, low, high, cap or math.inf))
    assert_equal(ours(case, config), wanted)


@given(cases(), st.floats(0.01, 1e3))
def test_m2po_and_its_gradient_equal_the_definition(case: Case, budget: float) -> None:
    case = replace(case, prox=case.theta)  # the bound is of the weights before the update
    outward = [
        logp - behav
        for logp, behav, advantage, trained in zip(case.theta, case.behav, case.advantage, case.mask, strict=True)
        if trained and advantage * (logp - behav) > 0
    ]
    square_T = torch.tensor(outward, dtype=torch.float64).square()
    mean_T = square_T.sort().values.cumsum(0) / torch.arange(1, len(outward) + 1)
    assume(not torch.isclose(mean_T, torch.tensor(budget, dtype=torch.float64), rtol=1e-9).any())
    bound = square_bound(square_T, budget)
    wanted = defined(case, lambda logp: reference.m2po(logp, case.behav, case.advantage, case.mask, budget))
    assert_equal(ours(case, M2POLoss(clip_high=budget), bound=bound), wanted)


answers = st.lists(st.lists(st.floats(-20.0, -1e-4), min_size=1, max_size=5), min_size=2, max_size=6)


@given(answers, st.data())
def test_dr_grpo_and_rloo_as_settings_equal_their_definitions(rows: list[list[float]], data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.floats(-2, 2), min_size=len(rows), max_size=len(rows)))
    behav = [[logp + data.draw(st.floats(-0.5, 0.5)) for logp in row] for row in rows]

    def settings_of(paper: LossConfig, kind: Literal["grpo_no_std", "rloo"], sampled: list[list[float]]) -> list[float]:
        flat = [logp for row in rows for logp in row]
        each = [a for a, row in zip(advantages(rewards, kind), rows, strict=True) for _ in row]
        case = Case(
            flat,
            flat,
            [logp for row in sampled for logp in row],
            each,
            [1] * len(flat),
            [i for i, row in enumerate(rows) for _ in row],
        )
        value, gradient = ours(case, paper)
        weight = token_weight("sums", Size(len(flat), len(rows)), 0, 0)
        return [weight * one for one in (value, *gradient)]

    def reference_of(definition: Callable[[list[list[Tensor]]], Tensor]) -> list[float]:
        logp = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row] for row in rows]
        if (loss := definition(logp)).requires_grad:  # the clip may hold every token
            loss.backward()
        return [loss.item(), *(0.0 if x.grad is None else x.grad.item() for row in logp for x in row)]

    exact = GRPOLoss(clip_low=0.2, clip_high=0.2, dual_clip=0)
    wanted = reference_of(lambda logp: reference.dr_grpo(logp, behav, rewards, 0.2))
    assert settings_of(exact, "grpo_no_std", behav) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    on_policy = ReinforceLoss(weight_cap=0, weight_level="sequence")
    wanted = reference_of(lambda logp: reference.rloo(logp, rewards))
    assert settings_of(on_policy, "rloo", rows) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(cases())
def test_cispo_and_its_gradient_equal_the_definition(case: Case) -> None:
    streams = (case.behav, case.advantage, case.mask)
    assert_equal(
        ours(case, CISPOLoss(weight_cap=5.0)), defined(case, lambda logp: reference.cispo(logp, *streams, 5.0))
    )


@given(cases(), st.sampled_from(["token", "sequence"]), over_caps)
def test_reinforce_and_its_gradient_equal_the_definition(
    case: Case, level: Literal["token", "sequence"], over_cap: Literal["clamp", "mask", "band"]
) -> None:
    config = ReinforceLoss(weight_cap=2.0, weight_level=level, over_cap=over_cap)
    streams = (case.behav, case.advantage, case.mask, case.rows)
    assert_equal(
        ours(case, config), defined(case, lambda logp: reference.reinforce(logp, *streams, 2.0, level, over_cap))
    )


@given(cases())
def test_soft_adaptive_and_its_gradient_equal_the_definition(case: Case) -> None:
    streams = (case.behav, case.advantage, case.mask)
    wanted = defined(case, lambda logp: reference.soft_adaptive(logp, *streams, 1.0, 1.05))
    assert_equal(ours(case, SoftAdaptiveLoss()), wanted)


@given(cases())
def test_positive_only_and_its_gradient_equal_the_definition(case: Case) -> None:
    wanted = defined(case, lambda logp: reference.positive_only(logp, case.advantage, case.mask))
    assert_equal(ours(case, PositiveOnlyLoss()), wanted)


@given(cases(), st.sampled_from(["k1", "k2", "k3"]))
def test_kl_and_its_gradient_equal_the_definition(case: Case, estimator: Literal["k1", "k2", "k3"]) -> None:
    case = replace(case, mask=[1] * len(case.mask))
    logp_T = torch.tensor(case.theta, dtype=torch.float64, requires_grad=True)
    terms_T = kl(logp_T, torch.tensor(case.prox, dtype=torch.float64), estimator)
    terms_T.sum().backward()
    assert logp_T.grad is not None
    wanted = defined(case, lambda logp: reference.kl(logp, case.prox, case.mask, estimator))
    assert_equal((terms_T.sum().item(), logp_T.grad.tolist()), wanted)


@given(cases())
def test_to_go_is_the_sum_over_the_rest_of_the_row(case: Case) -> None:
    values = case.advantage
    row_T = torch.tensor(case.rows, dtype=torch.long)
    got = to_go(torch.tensor(values, dtype=torch.float64), row_T, max(case.rows, default=-1) + 1)
    wanted = [
        math.fsum(values[i] for i in range(t, len(values)) if case.rows[i] == case.rows[t]) for t in range(len(values))
    ]
    assert got.tolist() == pytest.approx(wanted, abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_log_linear_proximal_logprobs_equal_the_definition(
    tokens: list[tuple[float, float, int]], push_every: int, since_push: int, taken: int
) -> None:
    logp, behav, versions = zip(*tokens, strict=True)
    config = TrainConfig(push_every=push_every, minibatches=2)
    age = Moment(9, since_push, taken).age(torch.tensor(versions), config)
    got = log_linear_prox(torch.tensor(logp, dtype=torch.float64), torch.tensor(behav, dtype=torch.float64), age, taken)
    before = 2 * (9 * push_every + since_push)
    wanted = [reference.log_linear_prox(lp, b, 2 * v * push_every, before, before + taken) for lp, b, v in tokens]
    assert got.tolist() == pytest.approx(wanted, abs=1e-9)


def test_log_linear_proximal_logprobs_of_a_first_update_are_its_own_however_far_pushes_are_apart() -> None:
    logp_T, behav_T, version_T = torch.tensor([-1.1]), torch.tensor([-2.0]), torch.tensor([5])
    age_T = Moment(5, since_push=3).age(version_T, TrainConfig(push_every=4))
    assert log_linear_prox(logp_T, behav_T, age_T, 0).item() == pytest.approx(-1.1)


@pytest.mark.parametrize("loss", [GRPOLoss(), DecoupledLoss(), GSPOLoss()])
def test_a_token_that_became_likelier_against_its_advantage_gives_no_boundless_gradient(loss: LossConfig) -> None:
    case = Case(theta=[-0.1], prox=[-10.1], behav=[-10.1], advantage=[-1.0], mask=[1], rows=[0])
    value, (slope,) = ours(case, loss)
    assert (value, slope) == (3.0, 0.0)


@pytest.mark.parametrize("logp", [math.log(0.9), math.log(0.5), math.log(0.3), math.log(0.01)])
def test_literal_autodiff_of_double_sided_has_the_wrong_sign_below_1_over_e_and_ours_has_not(logp: float) -> None:
    case = Case(theta=[logp], prox=[logp], behav=[logp], advantage=[1.0], mask=[1], rows=[0])
    (gradient,) = ours(case, DoubleSidedLoss())[1]
    literal = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    reference.double_sided_literal(literal, logp, 1.0).backward()
    assert literal.grad is not None
    # A rewarded token must become likelier: descending the loss must raise logp.
    assert gradient < 0
    assert (literal.grad.item() < 0) == (logp > -1)


@pytest.mark.parametrize("config", ALL_LOSSES)
@pytest.mark.parametrize("gap", [-300.0, -60.0, 60.0, 300.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite_in_float32(config: LossConfig, gap: float, advantage: float) -> None:
    case = Case(
        theta=[-1.0, -1.0],
        prox=[-1.0, -1.0 + gap],
        behav=[-1.0 + gap] * 2,
        advantage=[advantage] * 2,
        mask=[1, 1],
        rows=[0, 0],
    )
    loss, gradient = ours(case, config, torch.float32)
    assert all(math.isfinite(x) for x in (loss, *gradient))


def test_shares_count_clipped_masked_and_capped_tokens() -> None:
    ones = torch.ones(3)
    theta = torch.tensor([0.0, 1.0, 3.0]) - 4.0
    streams = Streams(theta, theta, ones * -4.0, ones, torch.zeros(3).long(), 1)
    clipped = token_loss(streams, GRPOLoss()).clipped_T
    masked = token_loss(streams, DoubleSidedLoss(clip_low=0.3, clip_high=5.0)).masked_T
    capped = token_loss(streams, DecoupledLoss(weight_cap=5.0)).capped_T
    left_out = token_loss(streams, DecoupledLoss(weight_cap=5.0, over_cap="mask")).masked_T
    assert [None if one is None else one.tolist() for one in (clipped, masked, capped, left_out)] == [
        [False, True, True],
        *[[False, False, True]] * 3,
    ]


def test_decoupled_weight_is_on_unless_the_config_says_otherwise_in_words() -> None:
    case = Case(theta=[-1.0], prox=[-1.0], behav=[-2.0], advantage=[1.0], mask=[1], rows=[0])
    assert ours(case, DecoupledLoss())[0] == pytest.approx(-math.e)
    assert ours(case, DecoupledLoss(behaviour_correction="off_and_biased"))[0] == pytest.approx(-1.0)


def twice_the_advantage(streams: Streams) -> Tensor:
    """A user's own loss."""
    return -2 * streams.advantage_T * streams.logp_T


def test_a_name_of_a_function_is_the_user_s_own_loss() -> None:
    case = Case(theta=[-1.0, -1.0], prox=[-1.0] * 2, behav=[-2.0] * 2, advantage=[1.0, 3.0], mask=[1, 0], rows=[0, 0])
    loss, gradient = ours(case, OwnLoss(function=f"{__name__}:twice_the_advantage"))
    assert loss == 2.0
    assert gradient == [-2.0, 0.0]


def only_the_likelier(streams: Streams) -> Tensor:
    """A user's own loss: a hinge at the proximal weights."""
    return -streams.advantage_T * torch.relu(streams.logp_T - streams.prox_T)


def only_the_less_likely(streams: Streams) -> Tensor:
    """A user's own loss: the hinge turned round."""
    return streams.advantage_T * torch.relu(streams.prox_T - streams.logp_T)


@pytest.mark.parametrize("function", [only_the_likelier, only_the_less_likely])
def test_an_own_loss_may_teach_only_the_tokens_on_one_side_of_the_proximal_weights(
    function: Callable[[Streams], Tensor],
) -> None:
    logp_T, zeros_T = torch.tensor([-1.0, -3.0]), torch.zeros(2)
    streams = Streams(logp_T, zeros_T - 2.0, zeros_T - 2.0, zeros_T + 1.0, zeros_T.long(), 1)
    taught = own_loss(f"{__name__}:{function.__name__}")(streams)
    assert taught.loss_T.tolist() == function(streams).tolist()
    assert torch.count_nonzero(taught.loss_T) == 1


def each_row_alike(streams: Streams) -> Tensor:
    """A user's own loss, which counts the tokens of each row."""
    counts_R = torch.bincount(streams.row_T, minlength=streams.rows)
    return -streams.advantage_T * streams.logp_T / counts_R[streams.row_T]


def test_an_own_loss_may_reckon_by_rows() -> None:
    ones_T = torch.ones(3)
    streams = Streams(-ones_T, -ones_T, -ones_T, ones_T, torch.tensor([0, 0, 1]), 2)
    assert own_loss(f"{__name__}:each_row_alike")(streams).loss_T.tolist() == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("kind", [kind for kind in LOSSES.values() if kind is not OwnLoss])
def test_every_loss_reads_the_weights_that_drew_each_token_unless_it_says_that_it_has_no_ratio(
    kind: type[Section],
) -> None:
    """At its defaults; within every clip and bound, where the gradient itself must be weighted."""
    config = TrainConfig.model_validate({"loss": {"name": kind.model_fields["name"].default}}).loss

    def gradient(behav: float) -> float:
        return ours(Case([-1.0], [-1.0], [behav], [1.0], [1], [0]), config)[1][0]

    has_no_ratio = "no ratio" in (kind.__doc__ or "")
    assert (gradient(-1.0) == gradient(-1.0 - 2e-4)) == has_no_ratio
    assert has_no_ratio == (kind is PositiveOnlyLoss)


def flat(streams: Streams) -> Tensor:
    return streams.advantage_T


def short(streams: Streams) -> Tensor:
    return streams.logp_T[:-1]


def not_finite(streams: Streams) -> Tensor:
    return streams.logp_T.log()


def steep(streams: Streams) -> Tensor:
    return (streams.logp_T - streams.logp_T.detach()).abs().sqrt()


def raises(streams: Streams) -> Tensor:
    return streams.logp_T / (1 // 0)


def refuses(streams: Streams) -> Tensor:
    raise ConfigError("clip: expected a number above 0")


def text(streams: Streams) -> str:
    return "loss"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("flat", "expected a gradient"),
        ("short", r"shape \[6\], got shape \[5\]"),
        ("not_finite", "expected finite numbers"),
        ("steep", "expected a finite gradient"),
        ("raises", "ZeroDivisionError"),
        ("refuses", "clip: expected a number above 0"),
        ("text", "expected a tensor or a TokenLoss, got str"),
        ("nowhere", "has no 'nowhere'"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused_before_the_first_step(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        own_loss(f"{__name__}:{name}")
