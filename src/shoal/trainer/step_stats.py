"""Sums for a step's statistics, kept on the device and read once."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.trainer.messages import RATIO_BOUNDS, StepStats
from shoal.trainer.optim import Update
from shoal.trainer.ranks import Ranks
from shoal.trainer.streams import TokenLoss


class StepTotals:
    """Sums over micro-batches; every mean is over tokens, so no packing changes it."""

    def __init__(self, device: torch.device | str) -> None:
        # float64: a squared ratio overflows float32 from 44 nats on.
        self._sums_K = torch.zeros(13, dtype=torch.float64, device=device)
        self._bounds = torch.tensor(RATIO_BOUNDS, dtype=torch.float64, device=device)
        self._bins = torch.zeros(len(RATIO_BOUNDS) + 1, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)
        self._computed_tokens = torch.zeros((), dtype=torch.long, device=device)
        self._value_loss = torch.zeros((), dtype=torch.float64, device=device)
        self.explained_variance: float | None = None

    def add(
        self,
        loss: Tensor,
        terms: TokenLoss,
        entropy_N: Tensor,
        gap_N: Tensor | None,
        fresh_N: Tensor,
        kl_N: Tensor,
        tokens: int,
    ) -> None:
        """Adds one micro-batch of `tokens` tokens, N of them trained.

        `loss` is the batch's part of the update's loss. `gap_N` is |logp_prox - logp_behav|, or None where it is
        unknown. `fresh_N` (bool) marks the tokens that the weights of logp_prox sampled. `kl_N` is the distance to the
        reference model.
        """
        with torch.no_grad():
            ratio_N = terms.ratio_T.double()
            one = torch.ones((), device=ratio_N.device)
            self._sums_K += torch.stack(
                [
                    loss.double(),
                    entropy_N.sum(dtype=torch.float64),
                    ratio_N.sum(),
                    ratio_N.square().sum(),
                    terms.clipped_T.sum().double(),
                    terms.masked_T.sum().double(),
                    terms.capped_T.sum().double(),
                    (one * 0 if gap_N is None else gap_N.sum(dtype=torch.float64)).double(),
                    one.double() * (0 if gap_N is None else gap_N.numel()),
                    (one * 0 if gap_N is None else gap_N[fresh_N].sum(dtype=torch.float64)).double(),
                    (one * 0 if gap_N is None else fresh_N.sum()).double(),
                    one.double() * ratio_N.numel(),
                    kl_N.sum(dtype=torch.float64),
                ]
            )
            self._bins += torch.bincount(torch.bucketize(ratio_N, self._bounds), minlength=len(self._bins))
            self._largest = torch.maximum(self._largest, ratio_N.max())
            self._computed_tokens += tokens

    def add_value_loss(self, value_loss_N: Tensor) -> None:
        """Adds the critic's loss of a micro-batch."""
        self._value_loss += value_loss_N.sum(dtype=torch.float64)

    def add_up(self, ranks: Ranks) -> None:
        """Sums the totals over all ranks."""
        ranks.add_up(self._sums_K, self._bins, self._computed_tokens, self._value_loss)
        ranks.largest(self._largest)

    def stats(
        self, updates: Sequence[Update], minibatches: int, tokens: int, skipped_tokens: int, seconds: float
    ) -> StepStats:
        """Statistics of the step; `tokens` were to be trained, and `skipped_tokens` of them were not computed."""
        sums = self._sums_K.tolist()
        loss, entropy, ratio, squares, clipped, masked, capped, gap, gaps, fresh, freshes, n, kl = sums
        taken = [update for update in updates if update.taken]
        trained = n or math.inf
        return StepStats(
            loss=loss / minibatches,
            grad_norm=_mean([update.grad_norm for update in taken]),
            update_norm=_mean([update.update_norm for update in taken]),
            lr=updates[-1].lr if updates else 0.0,
            entropy=entropy / trained,
            ratio_mean=ratio / trained,
            ratio_max=float(self._largest),
            ratio_shares=tuple(count / trained for count in self._bins.tolist()),
            clipped_share=clipped / trained,
            masked_share=masked / trained,
            capped_share=capped / trained,
            ess=ratio * ratio / (squares * n) if squares else 0.0,
            mismatch=gap / (gaps or math.inf),
            mismatch_fresh=fresh / freshes if freshes else None,
            kl=kl / trained,
            value_loss=float(self._value_loss) / trained,
            explained_variance=self.explained_variance,
            tokens=tokens,
            skipped_tokens=skipped_tokens,
            computed_tokens=int(self._computed_tokens),
            updates=len(taken),
            refused_updates=len(updates) - len(taken),
            seconds=seconds,
        )


def _mean(values: Sequence[float]) -> float:
    """Mean of the values; 0 without values."""
    return math.fsum(values) / len(values) if values else 0.0
