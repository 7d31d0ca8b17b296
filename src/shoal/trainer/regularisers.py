"""Regularisers for any loss: the distance to a reference model, in the loss or in the reward. Pure.

Streams are [T] and of one float type, logprobs in nats. Where the mask is false nothing is read, and the result is 0.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shoal.trainer.loss import bounded_exp

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


def kl(logp_T: Tensor, ref_T: Tensor, mask_T: Tensor, estimator: Estimator) -> Tensor:
    """Estimate of KL(pi, pi_ref) in nats from each sampled token.

    With d = log pi - log pi_ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.

    In value, k1 and k3 are unbiased. In a loss only k2 has the gradient of this KL: the gradient of k1 is 0 on average,
    and k3's is that of KL(pi_ref, pi). In a reward k1 is the unbiased choice. Source: Schulman, "Approximating KL
    divergence" (2020); GRPO uses k3 (arXiv 2402.03300 Eq. 4).

    >>> d = torch.tensor([0.0, 1.0])
    >>> [kl(d, torch.zeros(2), d >= 0, k).tolist() for k in ("k1", "k2")]
    [[0.0, 1.0], [0.0, 0.5]]
    """
    d_T = torch.where(mask_T, logp_T, 0.0) - torch.where(mask_T, ref_T, 0.0)
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
