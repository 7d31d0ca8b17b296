"""Files of a checkpoint: weights, moments and counters. Each rank writes the rows that it has, and reads them again.

    model.safetensors        trained tensors
    optimizer.safetensors    moments and counters

Any number of ranks reads what any other has written. A checkpoint counts once `experience.checkpoint.seal` has named
its directory: a crash leaves none half.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import TrainerError
from shoal.trainer.optim import Optimizer
from shoal.trainer.ranks import Ranks, like
from shoal.trainer.row_files import RowLayout, Rows, read_rows, rows_of, write_rows

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class CheckpointFiles:
    """Writes and reads the checkpoints of a trainer; every rank calls each method. Methods raise `TrainerError`.

    `trained` returns the tensors other than the optimizer's. At most one checkpoint is pending at a time.
    """

    def __init__(self, trained: Callable[[], dict[str, Tensor]], optimizer: Optimizer, ranks: Ranks) -> None:
        self._trained, self._optimizer, self._ranks = trained, optimizer, ranks
        self._writing: ThreadPoolExecutor | None = None
        self._written: Future[None] | None = None

    def save(self, directory: Path, *, later: bool = False) -> None:
        """Writes the files into an existing directory; for `later` it copies this rank's rows, and returns at once."""
        assert self._written is None, "a checkpoint is still being written"
        parts = {
            directory / name: (RowLayout.of(tensors), rows_of(tensors, self._ranks))
            for name, tensors in ((MODEL_FILE, self._trained()), (OPTIMIZER_FILE, self._optimizer.state()))
        }
        if not later:
            self._write(parts)
            return
        copies = {path: (layout, [_copy(one) for one in rows]) for path, (layout, rows) in parts.items()}
        self._writing = self._writing or ThreadPoolExecutor(1, "checkpoint")
        self._written = self._writing.submit(self._write, copies)

    def finish(self) -> None:
        """Waits until the pending checkpoint of `save` is written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Reads the files into the trained tensors and the optimizer, or resets the optimizer."""
        own = self._trained()
        weights = read_rows(directory / MODEL_FILE, own)
        state = read_rows(directory / OPTIMIZER_FILE, self._optimizer.places()) if optimizer else None
        if {name: one.shape for name, one in weights.items()} != {name: one.shape for name, one in own.items()}:
            raise TrainerError(f"{directory / MODEL_FILE}: expected the tensors of this model, got other ones")
        self._optimizer.reset() if state is None else self._optimizer.load_state(state)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(like(weights[name], tensor))

    def _write(self, parts: Mapping[Path, tuple[RowLayout, Iterable[Rows]]]) -> None:
        for path, (layout, rows) in parts.items():
            write_rows(path, layout, rows, self._ranks)


def _copy(rows: Rows) -> Rows:
    return replace(rows, values=rows.values.to("cpu", copy=True))
