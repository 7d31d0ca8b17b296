"""Rows as tensors, and the weight of each token's loss.

The weights come from the whole update, all its rows on all ranks, before any filter or mask. Any packing, any split and
any number of ranks therefore add up to the same loss and gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shoal.config import GSPOLoss, SoftAdaptiveLoss, TrainConfig
from shoal.types import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows: T tokens, of which N are trained."""

    tokens_T: Tensor
    lengths: tuple[int, ...]
    at_N: Tensor
    """Positions of the trained tokens in `tokens_T`."""
    behav_N: Tensor
    advantage_N: Tensor
    version_N: Tensor
    row_N: Tensor
    """Index of each token's row, from 0."""
    weight_N: Tensor
    """Weight of each token's loss: see `micro_batch.py`."""
    idle: bool = False
    """Whether the batch stands for no rows: its weights are 0 and no statistic counts it. Ranks compute it to keep
    in step."""
    prox_N: Tensor | None = None
    """Logprobs before the first update of the step, where they were computed; the next two fields are the critic's."""
    value_N: Tensor | None = None
    """Values before the first update of the step."""
    return_N: Tensor | None = None
    """Returns: the targets of the values."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rows of one optimizer update."""

    batches: tuple[MicroBatch, ...]
    """Computed rows of this rank."""
    informative: bool
    """Whether the update's rows, on all ranks, give a gradient."""
    tokens: int
    """Trained tokens of all rows, computed or not."""
    skipped_tokens: int
    """Trained tokens of the rows that are not computed."""


def micro_batch(
    rows: Sequence[Sample], weights: Sequence[float], device: torch.device | str, *, idle: bool = False
) -> MicroBatch:
    """Packs rows end to end; each has at least one trained token and a weight of its tokens."""
    trained = [sum(row.mask) for row in rows]
    at = [i for i, m in enumerate(m for row in rows for m in row.mask) if m]
    behav = [lp for row in rows for lp in row.logprobs]
    advantage = [a for row in rows for a in row.advantages]
    version = [v for row in rows for v in row.versions]

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def longs(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return MicroBatch(
        tokens_T=longs([token for row in rows for token in row.tokens]),
        lengths=tuple(len(row.tokens) for row in rows),
        at_N=longs(at),
        behav_N=floats([behav[i] for i in at]),
        advantage_N=floats([advantage[i] for i in at]),
        version_N=longs([version[i] for i in at]),
        row_N=longs([row for row, n in enumerate(trained) for _ in range(n)]),
        weight_N=floats([weight for weight, n in zip(weights, trained, strict=True) for _ in range(n)]),
        idle=idle,
    )


Mean: TypeAlias = Literal["tokens", "rows", "budget"]


@dataclass(frozen=True, slots=True)
class Size:
    """Trained tokens and rows of an update."""

    tokens: int
    """Trained tokens."""
    rows: int
    """Rows with at least one trained token."""


def size_of(rows: Sequence[Sample]) -> Size:
    """Size of some rows.

    >>> size_of([Sample((5, 6, 7), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (0.0, 1.0, 1.0))])
    Size(tokens=2, rows=1)
    """
    trained = [sum(row.mask) for row in rows]
    return Size(sum(trained), sum(count > 0 for count in trained))


def loss_mean(config: TrainConfig) -> Mean:
    """Mean of the config, or the mean with which its loss was published."""
    if config.loss_mean is not None:
        return config.loss_mean
    return "rows" if isinstance(config.loss, GSPOLoss | SoftAdaptiveLoss) else "tokens"


def token_weight(mean: Mean, size: Size, row_tokens: int, budget_tokens: int) -> float:
    """Weight of each trained token of a row with `row_tokens` trained tokens, in an update of a `size`.

    tokens  1 / tokens                  every token counts the same (DAPO, arXiv 2503.14476)
    rows    1 / (rows * row_tokens)     every row counts the same (GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071)
    budget  1 / (rows * budget_tokens)  a constant: a row's length changes nothing (Dr.GRPO, arXiv 2503.20783)

    >>> [token_weight(mean, Size(tokens=10, rows=2), 4, 8) for mean in ("tokens", "rows", "budget")]
    [0.1, 0.125, 0.0625]
    """
    match mean:
        case "tokens":
            return 1 / size.tokens
        case "rows":
            return 1 / (size.rows * row_tokens)
        case "budget":
            return 1 / (size.rows * budget_tokens)
