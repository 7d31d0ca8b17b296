"""Numbers of each trained token of a step, for inspection: `observe.token_files` reads them.

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
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor

from shoal.trainer.messages import CAPPED, CLIPPED, MASKED, TokensFile
from shoal.trainer.packing import MicroBatch
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
