"""Files of a checkpoint: weights, moments and counters. Each rank writes the rows that it has, and reads them again.

    model.safetensors        trained tensors
    optimizer.safetensors    moments and counters

Any number of ranks reads what any other has written. A checkpoint counts once `experience.checkpoint.seal` has named
its directory: a crash leaves none half.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.errors import TrainerError

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


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
