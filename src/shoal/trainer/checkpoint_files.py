"""Files of a checkpoint: whole ones of a single writer, or parts that each rank of one machine writes.

    model.safetensors, optimizer.safetensors    whole tensors: weights; moments and counters
    shard-R-model-I-of-N.safetensors            parts of rank R, written and joined by torch.distributed.checkpoint

Any number of ranks reads either. With parts no rank ever holds more of the model than its own. A checkpoint counts once
`experience.checkpoint.seal` has named its directory: a crash leaves none half.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.errors import TrainerError
from shoal.trainer.optim import Optimizer
from shoal.trainer.ranks import Ranks, like
from shoal.trainer.weight_files import read_tensors, write_tensors

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
FILE_BYTES: Final = 1 << 28
"""Bytes of one file of a rank, about: it is copied in memory while it is written."""


class CheckpointFiles:
    """Writes and reads the checkpoints of a trainer; every rank calls each method. Methods raise `TrainerError`.

    `trained` gives the tensors beside the optimizer's. At most one checkpoint is written later at a time.
    """

    def __init__(self, trained: Callable[[], dict[str, Tensor]], optimizer: Optimizer, ranks: Ranks) -> None:
        self._trained, self._optimizer, self._ranks = trained, optimizer, ranks
        self._group: distributed.ProcessGroup | None = None  # of writes beside a step, whose collectives have another
        self._writing: ThreadPoolExecutor | None = None
        self._written: Future[None] | None = None

    def save(self, directory: Path, *, later: bool = False) -> None:
        """Writes the files into an existing directory; for `later` it copies all tensors, and returns at once."""
        assert self._written is None, "a checkpoint is still being written"
        if not directory.is_dir():  # torch would make it
            raise TrainerError(f"{directory}: cannot be written: there is no such directory")
        weights, state = self._trained(), self._optimizer.state()
        if not self._ranks.own_files:
            weights, state = self._ranks.gather(weights), self._ranks.gather(state)
        if not later:
            self._write(directory, weights, state)
            return
        if self._ranks.own_files and self._group is None:
            self._group = distributed.new_group(backend="gloo")
        copies = [{name: one.to("cpu", copy=True) for name, one in part.items()} for part in (weights, state)]
        self._writing = self._writing or ThreadPoolExecutor(1, "checkpoint")
        self._written = self._writing.submit(self._write, directory, *copies)

    def finish(self) -> None:
        """Waits until what `save` left for later is written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def load(self, directory: Path) -> None:
        """Reads the files into the trained tensors and the optimizer."""
        if (directory / WEIGHTS_FILE).is_file():
            self._load_whole(directory)
        else:
            self._load_parts(directory)

    def _write(self, directory: Path, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        if self._ranks.own_files:
            tensors = {**weights, **state}
            with _told(f"{directory}: cannot be written"):
                save(tensors, storage_writer=self._writer(directory, tensors), process_group=self._group)
        elif self._ranks.first:
            write_tensors(directory / WEIGHTS_FILE, weights)
            write_tensors(directory / OPTIMIZER_FILE, state)

    def _writer(self, directory: Path, tensors: Mapping[str, Tensor]) -> HuggingFaceStorageWriter:
        file_of, size = {}, 0
        for name, tensor in tensors.items():
            size += tensor.nbytes // self._ranks.count
            file_of[name] = 1 + size // FILE_BYTES
        return HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=file_of, save_distributed=True)

    def _load_whole(self, directory: Path) -> None:
        weights, state = (read_tensors(directory / name) for name in (WEIGHTS_FILE, OPTIMIZER_FILE))
        own = self._trained()
        _check(directory / WEIGHTS_FILE, own, {name: one.shape for name, one in weights.items()})
        self._optimizer.load_state(state)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(like(weights[name], tensor))

    def _load_parts(self, directory: Path) -> None:
        with _told(f"{directory}: expected the files that the trainer saved"):
            found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        shapes = {name: one.size for name, one in found.items() if isinstance(one, TensorStorageMetadata)}
        if not shapes:
            raise TrainerError(f"{directory}: expected the files that the trainer saved, got none")
        own, state = self._trained(), self._optimizer.empty_state(shapes)
        _check(directory, own, {name: shape for name, shape in shapes.items() if name not in state})
        alone = self._ranks.count == 1
        with _told(f"{directory}: expected the files that the trainer saved"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # right for one rank
            load({**own, **state}, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=alone)
        self._optimizer.load_state(state)


def _check(path: Path, own: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    if {name: tensor.shape for name, tensor in own.items()} != shapes:
        raise TrainerError(f"{path}: expected the tensors of this model, got other ones")


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns errors of files into `TrainerError`."""
    try:
        yield
    except (CheckpointException, SafetensorError, OSError) as error:
        raise TrainerError(f"{what}: {error}") from error
