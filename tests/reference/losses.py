"""The losses as their papers define them: float64, one token at a time, slow. Nothing here is used outside tests.

Arguments are lists of one length: logprobs in nats (`logp` as 0-dimensional float64 tensors that carry the gradient,
the others as floats), the advantage, and a mask of 0 and 1. The result is the sum over the tokens with mask 1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _clip(value: Tensor, low: float, high: float) -> Tensor:
    if value < low:
        return torch.tensor(low, dtype=torch.float64)
    if value > high:
        return torch.tensor(high, dtype=torch.float64)
    return value


def grpo(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """DAPO, arXiv 2503.14476 Eq. 8 without its normalisation: sum of -min(r A, clip(r, 1 - low, 1 + high) A)."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            r = torch.exp(logp[t] - behav[t])
            total = total - min(r * advantage[t], _clip(r, 1 - clip_low, 1 + clip_high) * advantage[t])
    return total


def decoupled(
    logp: Sequence[Tensor],
    prox: Sequence[float],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    clip_low: float,
    clip_high: float,
    cap: float,
    over_cap: str,
    correction: bool = True,
) -> Tensor:
    """AReaL, arXiv 2505.24298 Eq. 5: sum of -(pi_prox / pi_behav) min(u A, clip(u) A), u = pi_theta / pi_prox.

    The weight is bounded by `cap`: clamped to it, or the token is left out.
    """
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            weight = math.exp(prox[t] - behav[t]) if correction else 1.0
            if weight > cap:
                weight = cap if over_cap == "clamp" else 0.0
            u = torch.exp(logp[t] - prox[t])
            total = total - weight * min(u * advantage[t], _clip(u, 1 - clip_low, 1 + clip_high) * advantage[t])
    return total


def double_sided(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    band_low: float,
    band_high: float,
) -> Tensor:
    """GLM-5, arXiv 2602.15763 §4.1.2: sum of -f(r) A log pi_theta, where f(r) is a coefficient, not differentiated."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            r = math.exp(logp[t].item() - behav[t])
            f = r if 1 - band_low < r < 1 + band_high else 0.0
            total = total - f * advantage[t] * logp[t]
    return total


def double_sided_literal(logp: Tensor, behav: float, advantage: float) -> Tensor:
    """One token of the same formula differentiated as it is printed, through r too."""
    return -torch.exp(logp - behav) * advantage * logp
