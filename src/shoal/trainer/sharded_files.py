"""Checkpoint of several ranks on one machine: each writes its own part, and any number of ranks reads all.

The files are safetensors of `torch.distributed.checkpoint`, which cuts and joins the parts. No rank ever holds more of
the model than its part. A checkpoint counts once `experience.checkpoint.seal` has named it: a crash leaves none half.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.errors import TrainerError

FILE_BYTES: Final = 1 << 28
"""Bytes of one file of a rank, about: it is copied in memory while it is written."""


def write(directory: Path, tensors: Mapping[str, Tensor], ranks: int) -> None:
    """Writes this rank's parts of the tensors; every rank calls it. Raises `TrainerError`."""
    if not directory.is_dir():  # torch would make it
        raise TrainerError(f"{directory}: cannot be written: there is no such directory")
    file_of, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.nbytes // ranks
        file_of[name] = 1 + size // FILE_BYTES
    writer = HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=file_of, save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except (CheckpointException, OSError) as error:
        raise TrainerError(f"{directory}: cannot be written: {error}") from error


def shapes(directory: Path) -> dict[str, torch.Size]:
    """Shapes of the whole tensors in a directory, by name."""
    found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: one.size for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


def read(directory: Path, tensors: Mapping[str, Tensor], ranks: int) -> None:
    """Reads this rank's parts into the tensors; every rank calls it. Raises `TrainerError`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # right for one rank
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=ranks == 1)
    except (CheckpointException, OSError) as error:
        raise TrainerError(f"{directory}: expected the files that the trainer saved: {error}") from error
