"""Files of a checkpoint: weights, moments and counters. Each rank writes the rows that it has, and reads them again.

    model.safetensors        trained tensors
    optimizer.safetensors    moments and counters

Any number of ranks reads what any other has written. A checkpoint counts once `experience.checkpoint.seal` has named
its directory: a crash leaves none half.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import TrainerError
from shoal.trainer.optim import Optimizer
from shoal.trainer.ranks import Ranks, like
from shoal.trainer.row_files import RowLayout, Rows, ranges_here, read_rows, rows_of, write_rows

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class CheckpointFiles:
    """Writes and reads the checkpoints of a trainer; every rank calls each method. Methods raise `TrainerError`.

    `trained` returns the tensors other than the optimizer's.
    """

    def __init__(
        self, trained: Callable[[], dict[str, Tensor]], optimizer: Optimizer, ranks: Ranks, later: "LaterFiles"
    ) -> None:
        self._trained, self._optimizer, self._ranks, self._later = trained, optimizer, ranks, later

    def save(self, directory: Path, *, later: bool = False) -> None:
        """Writes the files into an existing directory; for `later` it copies this rank's rows, and returns at once."""
        parts = {
            directory / name: (RowLayout.of(tensors), rows_of(tensors, self._ranks))
            for name, tensors in ((MODEL_FILE, self._trained()), (OPTIMIZER_FILE, self._optimizer.state()))
        }
        if not later:
            self._write(parts)
            return
        copies = {path: (layout, [one.copied() for one in rows]) for path, (layout, rows) in parts.items()}
        self._later.add(directory, lambda: self._write(copies))

    def ranges(self, directory: Path, *, optimizer: bool = True) -> dict[str, tuple[tuple[int, int], ...]]:
        """Offset and size of each range that `load` reads here, by file; the files may have their headers only."""
        alike = {MODEL_FILE: self._trained(), **({OPTIMIZER_FILE: self._optimizer.places()} if optimizer else {})}
        return {name: ranges_here(directory / name, tensors) for name, tensors in alike.items()}

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


class LaterFiles:
    """Files that a thread writes during the steps, in order, from copies of a rank's rows."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: dict[Path, Future[None]] = {}

    def add(self, directory: Path, write: Callable[[], None]) -> None:
        """Has files written into a directory, which gets no others meanwhile."""
        assert directory not in self._pending, f"{directory} is still being written"
        self._thread = self._thread or ThreadPoolExecutor(1, "later files")
        self._pending[directory] = self._thread.submit(write)

    def written(self, directory: Path) -> Future[None]:
        """Done when the files of a directory are there. Raises `TrainerError` for one that gets none."""
        if directory not in self._pending:
            raise TrainerError(f"{directory}: expected files that are being written, got none")
        return self._pending.pop(directory)
