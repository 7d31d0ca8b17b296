"""Rows as tensors: what one forward and backward, and what one optimizer update see."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Which of the rows, from 0."""
    weight_N: Tensor
    """What each token's loss is multiplied with: see `reduction.py`."""
    idle: bool = False
    """Stands for no rows: its weights are 0, it is computed because ranks compute in step, and it counts nowhere."""
    prox_N: Tensor | None = None
    """Logprobs before the first update of the step, where they were computed; the others are for the critic."""
    value_N: Tensor | None = None
    """Values before the first update of the step."""
    return_N: Tensor | None = None
    """What the values should be."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The rows of one optimizer update."""

    batches: tuple[MicroBatch, ...]
    """Only rows that are computed, of them this rank's."""
    informative: bool
    """Whether its rows, on all ranks, give a gradient."""
    tokens: int
    """Trained ones of all rows, computed or not."""
    skipped_tokens: int
    """Trained tokens of the rows that are not computed."""


def micro_batch(
    rows: Sequence[Sample], weights: Sequence[float], device: torch.device | str, *, idle: bool = False
) -> MicroBatch:
    """Rows end to end, each with at least one trained token and the weight of its tokens."""
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
