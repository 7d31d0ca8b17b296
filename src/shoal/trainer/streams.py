"""Inputs and outputs of a loss.

Streams are all [T], one value for each trained token of a micro-batch, and of one float type. Logprobs are in nats:

    logp_T       log pi_theta, the weights being trained; carries the gradient
    prox_T       log pi_prox, the weights before the first update of the step; no gradient
    behav_T      log pi_behav, as sampled; no gradient
    advantage_T  A
    row_T        int64, the row of the token, 0 .. rows - 1; sequence-level terms are per row

`square_bound` is the largest squared log ratio that `m2po` keeps in the update.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Streams:
    """Inputs of a loss for a micro-batch of T packed tokens; see the head of this file."""

    logp_T: Tensor
    prox_T: Tensor
    behav_T: Tensor
    advantage_T: Tensor
    row_T: Tensor
    rows: int
    square_bound: float = math.inf

    def __post_init__(self) -> None:
        shapes = {stream.shape for stream in (self.logp_T, self.prox_T, self.behav_T, self.advantage_T, self.row_T)}
        if len(shapes) != 1 or self.logp_T.ndim != 1:
            raise ValueError(f"streams must be one-dimensional and of one length, got shapes {shapes}")

    def behaviour_ratio(self) -> Tensor:
        """Ratio pi_theta / pi_behav, without gradient."""
        return bounded_exp((self.logp_T - self.behav_T).detach())


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss before its reduction; every field is [T]."""

    loss_T: Tensor
    """Loss per token; carries the gradient."""
    ratio_T: Tensor
    """Ratio pi_theta / pi_behav, without gradient."""
    clipped_T: Tensor | None = None
    """Mask (bool) of tokens whose gradient the clip removed; None for no token."""
    masked_T: Tensor | None = None
    """Mask (bool) of tokens whose gradient a bound on the importance weight removed; None for no token."""
    capped_T: Tensor | None = None
    """Mask (bool) of tokens whose importance weight was clamped to its bound; None for no token."""


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """Exponential with the exponent bounded at two thirds of the float type's range (59 nats for float32).

    Beyond the bound, a clipped token would turn inf * 0 into a NaN gradient.
    """
    bound = math.log(torch.finfo(log_ratio_T.dtype).max) * 2 / 3
    return torch.exp(log_ratio_T.clamp(-bound, bound))
