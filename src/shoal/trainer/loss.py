"""Policy-gradient losses, and the distance to a reference model, as pure functions over packed per-token streams.

A section of the config selects the loss, which returns one term per token, unreduced. The caller sums the terms over
all micro-batches and ranks with weights (`packing.token_weight`). These weights depend on the whole update before any
filter or mask. So no packing and no split changes loss or gradient, as long as rows stay whole.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from shoal.config.training import (
    CISPOLoss,
    DecoupledLoss,
    DoubleSidedLoss,
    DPOLoss,
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
)
from shoal.errors import ConfigError
from shoal.plugins import own_code
from shoal.trainer.streams import Streams, TokenLoss, bounded_exp

Level: TypeAlias = Literal["token", "sequence"]
OverCap: TypeAlias = Literal["clamp", "mask", "band"]
Estimator: TypeAlias = Literal["k1", "k2", "k3"]
LossFunction: TypeAlias = Callable[[Streams], TokenLoss]
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
"""Steepness of the gate of Soft Adaptive Policy Optimization, as published; it closes faster where A < 0."""


def token_loss(streams: Streams, config: LossConfig) -> TokenLoss:
    """Loss that the config names."""
    match config:
        case GRPOLoss():
            return grpo(streams, config)
        case DecoupledLoss():
            return decoupled(streams, config)
        case DoubleSidedLoss():
            return double_sided(streams, config)
        case GSPOLoss():
            return gspo(streams, config)
        case GMPOLoss():
            return gmpo(streams, config)
        case DPPOKLLoss() | DPPOTVLoss():
            return dppo(streams, config)
        case M2POLoss():
            return m2po(streams)
        case CISPOLoss():
            return weighted_reinforce(streams, config.weight_cap, level="token", over_cap="clamp")
        case ReinforceLoss():
            return weighted_reinforce(streams, config.weight_cap, level=config.weight_level, over_cap=config.over_cap)
        case SoftAdaptiveLoss():
            return soft_adaptive(streams, config)
        case PositiveOnlyLoss():
            return positive_only(streams)
        case DPOLoss():  # the advantages have the derivative of its sigmoid
            return weighted_reinforce(streams, math.inf, level="token", over_cap="clamp")
        case OwnLoss():
            return own_loss(config.function)(streams)


def grpo(streams: Streams, config: GRPOLoss) -> TokenLoss:
    """Clipped surrogate around the weights that sampled the token, with a wider upper bound.

    r = pi_theta / pi_behav,   loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at most -dual_clip A

    Takes and gives [T]. Source: PPO (arXiv 1707.06347 Eq. 7), dual clip (arXiv 1912.09729 Eq. 5), GRPO (arXiv
    2402.03300 Eq. 3) with the clip-higher and token-level mean of DAPO (arXiv 2503.14476 Eq. 10).
    """
    ratio_T = bounded_exp(streams.logp_T - streams.behav_T)
    surrogate_T, clipped_T = _clipped_surrogate(ratio_T, streams.advantage_T, config)
    return TokenLoss(-surrogate_T, ratio_T.detach(), clipped_T)


def decoupled(streams: Streams, config: DecoupledLoss) -> TokenLoss:
    """Decoupled PPO: the clip is around the proximal weights, and a weight corrects for the sampling policy.

    w = pi_prox / pi_behav,   u = pi_theta / pi_prox
    loss = -w' min(u A, clip(u, 1 - clip_low, 1 + clip_high) A), at most -w' dual_clip A

    The weight w' carries no gradient. It is min(w, weight_cap) when `over_cap` is "clamp". When `over_cap` is "mask",
    it is w, or 0 above the cap; "band" also sets it to 0 below 1 / weight_cap, as IcePop does (GLM-5, arXiv 2602.15763
    §3.2). With `weight_level` "sequence", w is the product over the row. With `behaviour_correction` "off_and_biased",
    w' is 1. Takes and gives [T]. Source: AReaL (arXiv 2505.24298 Eq. 5), Hilton et al. (arXiv 2110.00641).
    """
    prox_T = streams.prox_T.detach()
    ratio_T = bounded_exp(streams.logp_T - prox_T)
    surrogate_T, clipped_T = _clipped_surrogate(ratio_T, streams.advantage_T, config)
    if config.behaviour_correction == "off_and_biased":
        return TokenLoss(-surrogate_T, streams.behaviour_ratio(), clipped_T)
    w_T = _weight(streams, prox_T, config.weight_level)
    w_T, masked_T, capped_T = _bounded(w_T, config.weight_cap, config.over_cap)
    return TokenLoss(-w_T * surrogate_T, streams.behaviour_ratio(), clipped_T & ~masked_T, masked_T, capped_T)


def double_sided(streams: Streams, config: DoubleSidedLoss) -> TokenLoss:
    """Direct double-sided importance sampling: tokens whose ratio leaves the band give no gradient.

    r = pi_theta / pi_behav,   f(r) = r if 1 - clip_low <= r <= 1 + clip_high else 0,   loss = -f(r) A log pi_theta

    f(r) carries no gradient, so the gradient is -f(r) A grad log pi_theta. Differentiating through r as well would give
    the factor r (1 + log pi_theta), whose sign is wrong for every token with pi_theta < 1/e. Takes and gives [T].
    Source: GLM-5 (arXiv 2602.15763 §4.1.2).
    """
    ratio_T = streams.behaviour_ratio()
    inside_T = (ratio_T >= 1 - config.clip_low) & (ratio_T <= 1 + config.clip_high)
    loss_T = -torch.where(inside_T, ratio_T, 0.0) * streams.advantage_T * streams.logp_T
    return TokenLoss(loss_T, ratio_T, masked_T=~inside_T)


def gspo(streams: Streams, config: GSPOLoss) -> TokenLoss:
    """Clipped surrogate with one ratio per row: all tokens of a row are clipped, or none.

    s = (pi_theta(row) / pi_behav(row)) ^ (1 / tokens)
    loss_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t), at most -dual_clip A_t

    With one advantage per row the mean of loss_t over the row is the paper's term, so `loss_mean` defaults to "rows".
    Takes and gives [T]. Source: GSPO (arXiv 2507.18071 Eq. 5 and 7).
    """
    log_ratio_T = streams.logp_T - streams.behav_T
    ratio_T = bounded_exp(_row_sum(log_ratio_T, streams) / _row_sum(torch.ones_like(log_ratio_T), streams))
    surrogate_T, clipped_T = _clipped_surrogate(ratio_T, streams.advantage_T, config)
    return TokenLoss(-surrogate_T, streams.behaviour_ratio(), clipped_T)


def gmpo(streams: Streams, config: GMPOLoss) -> TokenLoss:
    """Geometric mean over a row of its tokens' ratios, each clipped on the side to which the advantage pushes it.

    d = log pi_theta - log pi_behav,   c = min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0
    loss_t = -exp(mean of c over the row) A_t

    The mean of loss_t over the row is the paper's term, so `loss_mean` defaults to "rows". Takes and gives [T]. Source:
    Geometric-Mean Policy Optimization (arXiv 2507.20673 Eq. 4), which clips ratios to exp(-0.4) .. exp(0.4).
    """
    A_T, d_T = streams.advantage_T, streams.logp_T - streams.behav_T
    c_T = torch.where(A_T > 0, d_T.clamp(max=config.clip_high), torch.where(A_T < 0, d_T.clamp(-config.clip_low), d_T))
    mean_T = _row_sum(c_T, streams) / _row_sum(torch.ones_like(c_T), streams)
    return TokenLoss(-bounded_exp(mean_T) * A_T, streams.behaviour_ratio(), (c_T != d_T).detach())


def dppo(streams: Streams, config: DPPOTVLoss | DPPOKLLoss) -> TokenLoss:
    """Importance-weighted policy gradient without the tokens that left a trust region of probability.

    p = pi_theta, q = pi_behav of the sampled token,   r = p / q, at most weight_cap and without gradient
    D = |p - q| ("dppo_tv"), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) ("dppo_kl")
    loss = -M r A log pi_theta,   M = 0 where D > clip_high, A > 0 and p > q, or D > clip_low, A < 0 and p < q; else 1

    Takes and gives [T]. Source: DPPO with binary divergences (arXiv 2602.04879). Its gradient is that of M r A.
    """
    A_T, ratio_T = streams.advantage_T, streams.behaviour_ratio()
    logp_T, behav_T = streams.logp_T.detach(), streams.behav_T
    p_T, q_T = logp_T.exp(), behav_T.exp()
    D_T = (p_T - q_T).abs()
    if isinstance(config, DPPOKLLoss):
        others_T = torch.special.xlog1py(1 - q_T, -q_T) - torch.special.xlog1py(1 - q_T, -p_T)
        D_T = q_T * (behav_T - logp_T) + others_T
    up_T, down_T = (A_T > 0) & (p_T > q_T), (A_T < 0) & (p_T < q_T)
    masked_T = (up_T & D_T.gt(config.clip_high)) | (down_T & D_T.gt(config.clip_low))
    w_T, _, capped_T = _bounded(ratio_T, config.weight_cap, "clamp")
    loss_T = -torch.where(masked_T, 0.0, w_T) * A_T * streams.logp_T
    return TokenLoss(loss_T, ratio_T, masked_T=masked_T, capped_T=capped_T & ~masked_T)


def m2po(streams: Streams) -> TokenLoss:
    """Importance-weighted policy gradient without the update's tokens of the largest log ratios.

    r = pi_theta / pi_behav,   loss = -M r A
    M = 0 where (log pi_prox - log pi_behav)^2 > square_bound and A pushes r further from 1, else 1

    `square_bound` is of the whole update: see `square_bound`. Takes and gives [T]. Source: M2PO (arXiv 2510.01161).
    """
    d_T = streams.prox_T - streams.behav_T
    masked_T = (d_T * streams.advantage_T > 0) & (d_T.square() > streams.square_bound)
    ratio_T = bounded_exp(streams.logp_T - streams.behav_T)
    loss_T = -torch.where(masked_T, 0.0, ratio_T * streams.advantage_T)
    return TokenLoss(loss_T, ratio_T.detach(), masked_T=masked_T)


def square_bound(square_T: Tensor, most: float) -> float:
    """Largest squared log ratio that `m2po` keeps: the mean of those up to it is at most `most`.

    Takes [T], those of the tokens of an update whose advantage pushes the ratio further from 1.

    >>> square_bound(torch.tensor([9.0, 0.0, 1.0]), most=0.5)
    1.0
    """
    sorted_T = square_T.double().sort().values
    within_T = sorted_T.cumsum(0) <= most * torch.arange(1, len(sorted_T) + 1, device=sorted_T.device)
    return float(sorted_T[within_T].max()) if within_T.any() else 0.0


def weighted_reinforce(streams: Streams, cap: float, *, level: Level, over_cap: OverCap) -> TokenLoss:
    """REINFORCE with importance weights that correct for the sampling policy.

    w = pi_theta / pi_behav, of the token or the product over the row,   loss = -w' A log pi_theta

    The weight w' carries no gradient; `over_cap` bounds it as in `decoupled`. Takes and gives [T]. Source: Williams
    1992, RLOO (arXiv 2402.14740) with the advantage "rloo"; truncated importance sampling (Ionides 2008, IMPALA arXiv
    1802.01561). At token level and clamped it is CISPO (MiniMax-M1, arXiv 2506.13585 Eq. 4 and 5, which has no lower
    bound).
    """
    w_T = _weight(streams, streams.logp_T.detach(), level)
    w_T, masked_T, capped_T = _bounded(w_T, cap, over_cap)
    loss_T = -w_T * streams.advantage_T * streams.logp_T
    return TokenLoss(loss_T, streams.behaviour_ratio(), masked_T=masked_T, capped_T=capped_T)


def soft_adaptive(streams: Streams, config: SoftAdaptiveLoss) -> TokenLoss:
    """Sigmoid in place of the clip: the gradient fades as the ratio leaves 1, sooner for negative advantages.

    r = pi_theta / pi_behav,   tau = TAU_POSITIVE if A > 0 else TAU_NEGATIVE
    loss = -(4 / tau) sigmoid(tau (r - 1)) A

    At r = 1 the gradient is -A grad log pi_theta. Takes and gives [T]. Source: Soft Adaptive Policy Optimization (arXiv
    2511.20347).
    """
    A_T = streams.advantage_T
    ratio_T = bounded_exp(streams.logp_T - streams.behav_T)
    tau_T = torch.where(A_T > 0, A_T.new_tensor(TAU_POSITIVE), A_T.new_tensor(TAU_NEGATIVE))
    return TokenLoss(-4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * A_T, ratio_T.detach())


def positive_only(streams: Streams) -> TokenLoss:
    """Imitation of answers better than the baseline: loss = -max(A, 0) log pi_theta.

    Without a ratio stale answers are imitated unchanged. Takes and gives [T]. Source: RAFT (arXiv 2304.06767; arXiv
    2504.11343 Eq. 3), weighted with the advantage.
    """
    return TokenLoss(-streams.advantage_T.clamp(min=0) * streams.logp_T, streams.behaviour_ratio())


def log_linear_prox(logp_T: Tensor, behav_T: Tensor, age_T: Tensor, taken: int) -> Tensor:
    """Log pi_prox, interpolated between the weights that sampled each token and the weights being trained.

    log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav),   alpha = age / (age + taken)

    `age_T` counts the optimizer updates from the weights that sampled a token to the weights before the step. `taken`
    counts the step's updates so far. So the first update of a step has the exact value for any distance between
    pushes. The interpolation spares the forward of "recomputed". Takes and gives [T], without gradient. Source: AReaL's
    log-linear approximation, whose alpha = (v_prox - v_behav) / (v_theta - v_behav) counts pushes.
    """
    age_T = age_T.clamp(min=0).to(behav_T.dtype)
    alpha_T = age_T / (age_T + taken) if taken else torch.ones_like(age_T)
    return behav_T + alpha_T * (logp_T.detach() - behav_T)


def kl(logp_T: Tensor, ref_T: Tensor, estimator: Estimator) -> Tensor:
    """Estimate of KL(pi, pi_ref) in nats from each sampled token.

    With d = log pi - log pi_ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.

    In value, k1 and k3 are unbiased. In a loss only k2 has the gradient of this KL: the gradient of k1 is 0 on average,
    and k3's is that of KL(pi_ref, pi). In a reward k1 is the unbiased choice. Source: Schulman, "Approximating KL
    divergence" (2020); GRPO uses k3 (arXiv 2402.03300 Eq. 4).

    >>> d = torch.tensor([0.0, 1.0])
    >>> [kl(d, torch.zeros(2), k).tolist() for k in ("k1", "k2")]
    [[0.0, 1.0], [0.0, 0.5]]
    """
    d_T = logp_T - ref_T
    match estimator:
        case "k1":
            return d_T
        case "k2":
            return d_T.square() / 2
        case "k3":
            return bounded_exp(-d_T) - 1 + d_T


def to_go(x_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Sum of x from each token to the end of its row; `row_T` must not decrease.

    Subtracting the sum of x = coefficient * kl(pi_behav, pi_ref) from the returns is the KL penalty in the reward: a
    token is responsible for all later tokens. Source: REINFORCE++ (arXiv 2501.03262), PPO for language models (arXiv
    2203.02155).

    >>> to_go(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 1]), 2).tolist()
    [6.0, 5.0, 3.0, 4.0]
    """
    # float64: differences of running sums over many rows lose the digits of short rows.
    wide_T = x_T.double()
    ends_R = wide_T.new_zeros(rows).index_add(0, row_T, wide_T).cumsum(0)
    return (ends_R[row_T] - wide_T.cumsum(0) + wide_T).to(x_T.dtype)


def _row_sum(x_T: Tensor, streams: Streams) -> Tensor:
    """Sum of x over each token's row."""
    return x_T.new_zeros(streams.rows).index_add(0, streams.row_T, x_T)[streams.row_T]


def _weight(streams: Streams, logp_T: Tensor, level: Level) -> Tensor:
    """Weight exp(logp) / pi_behav of each token, or its product over the token's row."""
    log_ratio_T = logp_T - streams.behav_T
    return bounded_exp(log_ratio_T if level == "token" else _row_sum(log_ratio_T, streams))


def _bounded(w_T: Tensor, cap: float, over_cap: OverCap) -> tuple[Tensor, Tensor, Tensor]:
    """Weights within their bounds, and masks of the masked and of the clamped weights. A cap of 0 is no bound."""
    cap = cap or math.inf
    over_T, none_T = w_T > cap, torch.zeros_like(w_T, dtype=torch.bool)
    if over_cap == "clamp":
        return w_T.clamp(max=cap), none_T, over_T
    masked_T = over_T | (w_T < 1 / cap) if over_cap == "band" else over_T
    return torch.where(masked_T, 0.0, w_T), masked_T, none_T


def _clipped_surrogate(
    ratio_T: Tensor, A_T: Tensor, config: GRPOLoss | DecoupledLoss | GSPOLoss
) -> tuple[Tensor, Tensor]:
    """Surrogate min(r A, clip(r) A), where A < 0 at least dual_clip A; and the mask of zero gradients."""
    free_T = ratio_T * A_T
    held_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high) * A_T
    over_T = (A_T < 0) & (ratio_T.detach() > (config.dual_clip or math.inf))
    surrogate_T = torch.where(over_T, config.dual_clip * A_T, torch.minimum(free_T, held_T))
    return surrogate_T, over_T | (held_T.detach() < free_T.detach())


@cache
def own_loss(name: str) -> LossFunction:
    """User's function over `Streams`, which returns a `TokenLoss` or the loss of each token, a tensor [T].

    Raises `ConfigError` for a function that cannot be imported. A small example also refuses wrong shapes, numbers that
    are not finite, and a missing gradient.
    """
    function = cast(Callable[[Streams], object], own_code("train.loss", name))

    def loss(streams: Streams) -> TokenLoss:
        given = function(streams)
        if isinstance(given, Tensor):
            given = TokenLoss(given, streams.behaviour_ratio())
        if not isinstance(given, TokenLoss):
            raise ConfigError(f"train.loss: {name!r}: expected a tensor or a TokenLoss, got {type(given).__name__}")
        if given.loss_T.shape != streams.logp_T.shape:
            raise ConfigError(
                f"train.loss: {name!r}: expected one number per token, shape {list(streams.logp_T.shape)}, "
                f"got shape {list(given.loss_T.shape)}"
            )
        return given

    _check(name, loss)
    return loss


def _check(name: str, loss: LossFunction) -> None:
    """Raises `ConfigError` unless the loss of two rows of three tokens is finite and has a finite gradient."""
    logp_T = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5], requires_grad=True)
    prox_T = torch.tensor([-0.55, -0.95, -2.2, -0.1, -2.5, -1.45])
    behav_T = torch.tensor([-0.6, -0.9, -2.5, -0.1, -2.0, -1.4])
    advantage_T = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    row_T = torch.tensor([0, 0, 0, 1, 1, 1])
    streams = Streams(logp_T, prox_T, behav_T, advantage_T, row_T, 2)
    gradient_T = None
    try:
        with torch.enable_grad():
            loss_T = loss(streams).loss_T
            if loss_T.requires_grad:
                (gradient_T,) = torch.autograd.grad(loss_T.sum(), logp_T, allow_unused=True)
    except ConfigError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"train.loss: {name!r} failed: {type(error).__name__}: {error}") from error
    if not loss_T.isfinite().all():
        raise ConfigError(f"train.loss: {name!r}: expected finite numbers, got {loss_T.tolist()}")
    if gradient_T is None or not gradient_T.any():
        raise ConfigError(f"train.loss: {name!r}: expected a gradient with respect to logp_T, got none")
    if not gradient_T.isfinite().all():
        raise ConfigError(f"train.loss: {name!r}: expected a finite gradient, got {gradient_T.tolist()}")
