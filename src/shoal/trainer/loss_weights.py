"""Weight of each token's loss in the sum of an update. Pure.

The weights depend on the whole update, all its rows on all ranks, before any filter or mask. So any packing, any split
and any number of ranks add up to the same loss and gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.config import GSPOLoss, SoftAdaptiveLoss, TrainConfig
from shoal.types import Sample

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
