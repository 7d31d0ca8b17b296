"""Inputs and outputs of a loss.

Streams are all [T] and of one float type, logprobs in nats:

    logp_T       log pi_theta, the weights being trained; carries the gradient
    prox_T       log pi_prox, the weights before the first update of the step; no gradient
    behav_T      log pi_behav, as sampled; no gradient
    advantage_T  A
    mask_T       bool; where it is false nothing is read: NaN there reaches neither loss nor gradient
    row_T        int64, the row of the token, 0 .. rows - 1; sequence-level terms are per row
"""

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
    mask_T: Tensor
    row_T: Tensor
    rows: int

    def __post_init__(self) -> None:
        floats = (self.logp_T, self.prox_T, self.behav_T, self.advantage_T)
        shapes = {stream.shape for stream in (*floats, self.mask_T, self.row_T)}
        if len(shapes) != 1 or self.logp_T.ndim != 1 or self.mask_T.dtype is not torch.bool:
            raise ValueError(
                f"streams must be one-dimensional, of one length and with a bool mask, got shapes {shapes}"
            )


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss before its reduction; every field is [T], and 0 or false where the mask is false."""

    loss_T: Tensor
    """Loss per token; carries the gradient."""
    ratio_T: Tensor
    """Ratio pi_theta / pi_behav, without gradient."""
    clipped_T: Tensor
    """Mask (bool) of tokens whose gradient the clip removed."""
    masked_T: Tensor
    """Mask (bool) of tokens whose gradient a bound on the importance weight removed."""
    capped_T: Tensor
    """Mask (bool) of tokens whose importance weight was clamped to its bound."""
