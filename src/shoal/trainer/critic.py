"""Critic: values of partial answers, and advantages by generalised advantage estimation. Pure.

Streams are [T] of one float type over the trained tokens, in order. `row_T` (int64, not decreasing) holds the row of
each token. The value of a token is the critic's estimate for the text before it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

VALUE_CLIP = 0.2
"""Distance that a step may move a value before its gradient is cut, as PPO's clip of the ratio."""
COEFFICIENT = 0.5
"""Weight of the value loss (PPO); `train.critic.lr` sets how fast the value head learns."""


def gae(reward_T: Tensor, value_T: Tensor, row_T: Tensor, rows: int, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages, and the returns as targets of the values; neither carries a gradient.

    delta_t = r_t + V_{t+1} - V_t   (V = 0 after a row's last token)
    A_t = delta_t + lambda A_{t+1},   R_t = A_t + V_t

    Nothing is discounted: an answer's worth does not depend on its length. With lambda = 1, R_t is the sum of the later
    rewards. Takes and gives [T]. Source: arXiv 1506.02438 Eq. 16 with gamma = 1; PPO (arXiv 1707.06347 Eq. 11).

    >>> reward, value = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.5, 0.25, 4.0])
    >>> [stream.tolist() for stream in gae(reward, value, torch.tensor([0, 0, 1]), 2, 0.5)]
    [[0.125, 0.75, 1.0], [0.625, 1.0, 5.0]]
    """
    counts_R = torch.bincount(row_T, minlength=rows)
    first_R = counts_R.cumsum(0) - counts_R
    column_T = torch.arange(len(row_T), device=row_T.device) - first_R[row_T]
    longest = int(counts_R.max()) if len(row_T) else 0
    # One extra column: after a row's end reward, value and advantage are 0.
    reward_RL, value_RL, advantage_RL = reward_T.new_zeros(3, rows, longest + 1)
    reward_RL[row_T, column_T] = reward_T.detach()
    value_RL[row_T, column_T] = value_T.detach()
    for t in range(longest - 1, -1, -1):
        delta_R = reward_RL[:, t] + value_RL[:, t + 1] - value_RL[:, t]
        advantage_RL[:, t] = delta_R + gae_lambda * advantage_RL[:, t + 1]
    advantage_T = advantage_RL[row_T, column_T]
    return advantage_T, advantage_T + value_T.detach()


def at_row_ends(x_T: Tensor, row_T: Tensor) -> Tensor:
    """Values of x at the last token of each row, 0 elsewhere: a reward comes when the row ends.

    >>> at_row_ends(torch.tensor([1.0, 1.0, 3.0]), torch.tensor([0, 0, 1])).tolist()
    [0.0, 1.0, 3.0]
    """
    last_T = torch.ones_like(row_T, dtype=torch.bool)
    last_T[:-1] = row_T[:-1] != row_T[1:]
    return torch.where(last_T, x_T, 0.0)


def value_loss(value_T: Tensor, before_T: Tensor, return_T: Tensor, clip: float) -> Tensor:
    """Clipped value loss max((V - R)^2, (V_clipped - R)^2) / 2.

    V_clipped is at most `clip` away from the value before the step.

    Takes and gives [T]. Source: the value clipping of PPO's reference implementation (arXiv 2005.12729 §3).

    >>> value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.25).tolist()
    [0.28125]
    """
    clipped_T = before_T + (value_T - before_T).clamp(-clip, clip)
    return torch.maximum((value_T - return_T).square(), (clipped_T - return_T).square()) / 2


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor]) -> float | None:
    """Explained variance 1 - Var(R - V) / Var(R): 1 for a critic that knows the returns, 0 if it knows only their mean.

    Equal returns give None.

    >>> explained_variance([torch.tensor([0.0, 1.0])], [torch.tensor([0.0, 2.0])])
    0.75
    """
    if not returns:
        return None
    value_T, return_T = torch.cat(list(values)).double(), torch.cat(list(returns)).double()
    spread = float(return_T.var(correction=0)) if len(return_T) else 0.0
    return 1 - float((return_T - value_T).var(correction=0)) / spread if spread else None
