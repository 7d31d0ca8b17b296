"""Statistics of a step: sums, kept on the device and read once, and the numbers of each trained token for inspection.

The numbers are in one file for a step, which `observe.token_files` reads:

    row_R, count_R  index of each row among the step's rows, and the number of its trained tokens
    weight_R        weight of each token's loss in the update (`packing.token_weight`)
    logp_N          log pi_theta when the token was trained, in nats
    entropy_N       entropy of that distribution, in nats
    advantage_N     advantage as the loss saw it
    gradient_N      minus the derivative of the update's loss by logp: above 0 the token is made more likely
    fate_N          sum of CLIPPED, MASKED and CAPPED

Rows without any advantage are not computed, and so are not there. With several ranks each writes its own rows.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor

from shoal.trainer.messages import CAPPED, CLIPPED, MASKED, RATIO_BOUNDS, StepStats, TokensFile
from shoal.trainer.optim import Update
from shoal.trainer.packing import MicroBatch, Minibatch
from shoal.trainer.ranks import Ranks
from shoal.trainer.streams import TokenLoss


class TokenNumbers:
    """Collector of the numbers of one step, kept on the device until `write`."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def add(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, advantage_N: Tensor, terms: TokenLoss, ranks: int
    ) -> None:
        """Adds one micro-batch after its backward; `logp_N` has the gradient of `ranks` times the loss."""
        assert logp_N.grad is not None
        masks = ((terms.clipped_T, CLIPPED), (terms.masked_T, MASKED), (terms.capped_T, CAPPED))
        fate_N = torch.zeros_like(logp_N, dtype=torch.uint8)
        for mask_N, bit in masks:
            if mask_N is not None:
                fate_N += mask_N * bit
        count_R = batch.row_N.new_zeros(len(batch.rows)).index_add_(0, batch.row_N, torch.ones_like(batch.row_N))
        first_R = count_R.cumsum(0) - count_R
        found = {
            "row_R": torch.tensor(batch.rows, dtype=torch.int32),
            "count_R": count_R.int(),
            "weight_R": batch.weight_N[first_R],
            "logp_N": logp_N.detach(),
            "entropy_N": entropy_N.half(),
            "advantage_N": advantage_N,
            "gradient_N": -logp_N.grad / ranks,
            "fate_N": fate_N,
        }
        for name, tensor in found.items():
            self._parts.setdefault(name, []).append(tensor.detach())

    def write(self, file: TokensFile, rows: Sequence[int], rank: int) -> None:
        """Writes a safetensors file; `rows` counts each group's rows.

        A full disk loses the file, not the step; the trainer's log reports it.
        """
        path = Path(file.path)
        if rank:
            path = path.with_suffix(f".{rank}{path.suffix}")
        metadata = {"groups": json.dumps(list(zip(file.group_ids, rows, strict=True)))}
        whole = {name: torch.cat(parts).numpy(force=True) for name, parts in self._parts.items()}
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(whole, unfinished, metadata=metadata)
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            print(f"{path} was not written: {error}", file=sys.stderr, flush=True)
            unfinished.unlink(missing_ok=True)


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
