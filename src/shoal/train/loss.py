"""Policy-gradient losses as pure functions over packed per-token streams.

A loss is chosen by its section of the config and returns one term per token, unreduced. The caller adds the terms up
over all micro-batches and ranks and divides by one number, the count of trained tokens of the whole update before any
filter or mask; so no packing and no split changes loss or gradient.

Streams, all [T] and of one float type, logprobs in nats:
    logp_T       log pi_theta, the weights being trained; carries the gradient
    prox_T       log pi_prox, the weights before the first update of the step; no gradient
    behav_T      log pi_behav, as drawn; no gradient
    advantage_T  A
    mask_T       bool; where it is false nothing is read: NaN there reaches neither loss nor gradient
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import DecoupledLoss, DoubleSidedLoss, GRPOLoss, LossConfig


@dataclass(frozen=True, slots=True)
class Streams:
    """What a loss reads of a micro-batch of T packed tokens; see the head of this file."""

    logp_T: Tensor
    prox_T: Tensor
    behav_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor

    def __post_init__(self) -> None:
        shapes = {self.logp_T.shape, self.prox_T.shape, self.behav_T.shape, self.advantage_T.shape, self.mask_T.shape}
        if len(shapes) != 1 or self.logp_T.ndim != 1 or self.mask_T.dtype is not torch.bool:
            raise ValueError(
                f"streams must be one-dimensional, of one length and with a bool mask, got shapes {shapes}"
            )


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before its reduction; everything is [T], and 0 or false where the mask is false."""

    loss_T: Tensor
    """Carries the gradient."""
    ratio_T: Tensor
    """pi_theta / pi_behav, without gradient."""
    clipped_T: Tensor
    """bool: the clip removed the gradient."""
    masked_T: Tensor
    """bool: a bound on the importance weight removed the gradient."""
    capped_T: Tensor
    """bool: the importance weight was clamped to its bound."""


def token_loss(streams: Streams, config: LossConfig) -> TokenLoss:
    """The loss that the config names."""
    match config:
        case GRPOLoss():
            return grpo(streams, config)
        case DecoupledLoss():
            return decoupled(streams, config)
        case DoubleSidedLoss():
            return double_sided(streams, config)


def grpo(streams: Streams, config: GRPOLoss) -> TokenLoss:
    """Clipped surrogate around the weights that drew the token, with a wider upper bound.

        r = pi_theta / pi_behav,   loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Takes and gives [T]. Source: PPO (arXiv 1707.06347 Eq. 7), GRPO (arXiv 2402.03300 Eq. 3) with the clip-higher and
    the token-level mean of DAPO (arXiv 2503.14476 Eq. 10).
    """
    m = streams.mask_T
    A_T = _where(m, streams.advantage_T)
    ratio_T = _ratio(streams.logp_T, streams.behav_T, m)
    surrogate_T, clipped_T = _clipped_surrogate(ratio_T, A_T, config.clip_low, config.clip_high)
    none_T = torch.zeros_like(m)
    return TokenLoss(-surrogate_T, _where(m, ratio_T.detach()), clipped_T & m, none_T, none_T)


def decoupled(streams: Streams, config: DecoupledLoss) -> TokenLoss:
    """Decoupled PPO: the clip is around the proximal weights, and each token is weighted back to those that drew it.

        w = pi_prox / pi_behav,   u = pi_theta / pi_prox
        loss = -w' min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)

    w' carries no gradient: it is min(w, weight_cap) when `over_cap` is "clamp", and w or, above the cap, 0 when it is
    "mask". With `behaviour_correction` "off_and_biased" w' is 1. Takes and gives [T].
    Source: AReaL (arXiv 2505.24298 Eq. 5), Hilton et al. (arXiv 2110.00641).
    """
    m = streams.mask_T
    A_T = _where(m, streams.advantage_T)
    prox_T = streams.prox_T.detach()
    surrogate_T, clipped_T = _clipped_surrogate(
        _ratio(streams.logp_T, prox_T, m), A_T, config.clip_low, config.clip_high
    )
    masked_T = capped_T = torch.zeros_like(m)
    w_T = torch.ones_like(A_T)
    if config.behaviour_correction == "on":
        w_T = _ratio(prox_T, streams.behav_T.detach(), m)
        over_T = w_T > config.weight_cap
        if config.over_cap == "mask":
            masked_T, w_T = over_T, torch.where(over_T, 0.0, w_T)
        else:
            capped_T, w_T = over_T, w_T.clamp(max=config.weight_cap)
    ratio_T = _where(m, _ratio(streams.logp_T.detach(), streams.behav_T.detach(), m))
    return TokenLoss(-w_T * surrogate_T, ratio_T, clipped_T & m & ~masked_T, masked_T, capped_T)


def double_sided(streams: Streams, config: DoubleSidedLoss) -> TokenLoss:
    """Direct double-sided importance sampling: tokens whose ratio leaves the band give no gradient.

        r = pi_theta / pi_behav,   f(r) = r if 1 - band_low < r < 1 + band_high else 0,   loss = -f(r) A log pi_theta

    f(r) carries no gradient, so the gradient is -f(r) A grad log pi_theta. Differentiating through r as well would give
    the factor r (1 + log pi_theta), whose sign is wrong for every token with pi_theta < 1/e. Takes and gives [T].
    Source: GLM-5 (arXiv 2602.15763 §4.1.2).
    """
    m = streams.mask_T
    A_T = _where(m, streams.advantage_T)
    ratio_T = _ratio(streams.logp_T.detach(), streams.behav_T.detach(), m)
    inside_T = (ratio_T > 1 - config.band_low) & (ratio_T < 1 + config.band_high)
    f_T = torch.where(inside_T, ratio_T, 0.0)
    loss_T = -f_T * A_T * _where(m, streams.logp_T)
    none_T = torch.zeros_like(m)
    return TokenLoss(loss_T, _where(m, ratio_T), none_T, ~inside_T & m, none_T)


def _where(mask_T: Tensor, x_T: Tensor) -> Tensor:
    """x where the mask is true, 0 elsewhere. Multiplying by the mask instead would keep NaN."""
    return torch.where(mask_T, x_T, 0.0)


def _ratio(logp_T: Tensor, base_T: Tensor, mask_T: Tensor) -> Tensor:
    """exp(logp - base) where the mask is true, 1 elsewhere.

    The exponent is bounded at two thirds of what the float type can express (59 nats for float32): beyond, a clipped
    token would turn inf * 0 into a NaN gradient.
    """
    bound = math.log(torch.finfo(logp_T.dtype).max) * 2 / 3
    log_ratio_T = _where(mask_T, logp_T) - _where(mask_T, base_T)
    return torch.exp(log_ratio_T.clamp(-bound, bound))


def _clipped_surrogate(ratio_T: Tensor, A_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and where the second is the smaller: there the gradient is zero."""
    free_T = ratio_T * A_T
    held_T = ratio_T.clamp(1 - low, 1 + high) * A_T
    return torch.minimum(free_T, held_T), held_T.detach() < free_T.detach()
