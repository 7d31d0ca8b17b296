"""Sums for a step's statistics, kept on the device and read once."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.trainer.messages import RATIO_BOUNDS, StepStats
from shoal.trainer.optim import Update
from shoal.trainer.packing import Minibatch
from shoal.trainer.ranks import Ranks
from shoal.trainer.streams import TokenLoss
from shoal.trainer.token_numbers import TokenNumbers

SUMS = (
    *("loss", "entropy", "ratio", "squared_ratio", "clipped", "masked", "capped", "kl", "value_loss"),
    *("gap", "gaps", "fresh_gap", "fresh_gaps", "trained", "computed"),
)


class StepTotals:
    """Sums over micro-batches; every mean is over tokens, so no packing changes it."""

    def __init__(self, device: torch.device | str, tokens: TokenNumbers | None = None) -> None:
        """`tokens` collects the numbers of each token, if somebody wants them."""
        # float64: a squared ratio overflows float32 from 44 nats on.
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums = dict.fromkeys(SUMS, zero)
        self._largest = zero
        self._bounds = torch.tensor(RATIO_BOUNDS, dtype=torch.float64, device=device)
        self._bins = torch.zeros(len(RATIO_BOUNDS) + 1, dtype=torch.float64, device=device)
        self.explained_variance: float | None = None
        self.tokens = tokens

    @torch.no_grad()
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
        ratio_N = terms.ratio_T.double()
        self._add(
            loss=loss,
            entropy=entropy_N,
            ratio=ratio_N,
            squared_ratio=ratio_N.square(),
            clipped=terms.clipped_T,
            masked=terms.masked_T,
            capped=terms.capped_T,
            kl=kl_N,
            trained=torch.ones_like(ratio_N),
            computed=ratio_N.new_full((), tokens),
        )
        if gap_N is not None:
            self._add(
                gap=gap_N, gaps=torch.ones_like(gap_N), fresh_gap=torch.where(fresh_N, gap_N, 0.0), fresh_gaps=fresh_N
            )
        self._bins.index_add_(0, torch.bucketize(ratio_N, self._bounds), torch.ones_like(ratio_N))
        self._largest = torch.maximum(self._largest, ratio_N.max())

    def _add(self, **streams: Tensor | None) -> None:
        for name, stream in streams.items():
            if stream is not None:
                self._sums[name] = self._sums[name] + stream.sum(dtype=torch.float64)

    def add_value_loss(self, value_loss_N: Tensor) -> None:
        """Adds the critic's loss of a micro-batch."""
        self._add(value_loss=value_loss_N)

    def add_up(self, ranks: Ranks) -> None:
        """Sums the totals over all ranks."""
        sums = torch.stack(list(self._sums.values()))
        ranks.add_up(sums, self._bins)
        self._sums = dict(zip(SUMS, sums, strict=True))
        ranks.largest(self._largest)

    def stats(
        self, updates: Sequence[Update], minibatches: Sequence[Minibatch], seconds: float, weights: str
    ) -> StepStats:
        """Statistics of a step of some updates, each of one minibatch; `weights` is their fingerprint after it."""
        sums = {name: float(total) for name, total in self._sums.items()}
        taken = [update for update in updates if update.taken]
        trained = sums["trained"] or math.inf
        return StepStats(
            loss=sums["loss"] / len(minibatches),
            grad_norm=_mean([update.grad_norm for update in taken]),
            update_norm=_mean([update.update_norm for update in taken]),
            lr=updates[-1].lr if updates else 0.0,
            entropy=sums["entropy"] / trained,
            ratio_mean=sums["ratio"] / trained,
            ratio_max=float(self._largest),
            ratio_shares=tuple(count / trained for count in self._bins.tolist()),
            clipped_share=sums["clipped"] / trained,
            masked_share=sums["masked"] / trained,
            capped_share=sums["capped"] / trained,
            ess=sums["ratio"] ** 2 / (sums["squared_ratio"] * trained) if sums["squared_ratio"] else 0.0,
            mismatch=sums["gap"] / (sums["gaps"] or math.inf),
            mismatch_fresh=sums["fresh_gap"] / sums["fresh_gaps"] if sums["fresh_gaps"] else None,
            kl=sums["kl"] / trained,
            value_loss=sums["value_loss"] / trained,
            explained_variance=self.explained_variance,
            tokens=sum(minibatch.tokens for minibatch in minibatches),
            skipped_tokens=sum(minibatch.skipped_tokens for minibatch in minibatches),
            computed_tokens=int(sums["computed"]),
            updates=len(taken),
            refused_updates=len(updates) - len(taken),
            seconds=seconds,
            weights=weights,
        )


def _mean(values: Sequence[float]) -> float:
    """Mean of the values; 0 without values."""
    return math.fsum(values) / len(values) if values else 0.0
