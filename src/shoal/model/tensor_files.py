"""Tensors of a checkpoint directory, read one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.errors import ModelError

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Tensors(Protocol):
    """Tensors of a checkpoint by name."""

    def __iter__(self) -> Iterator[str]: ...

    def whole(self, name: str) -> Tensor:
        """One tensor."""
        ...

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of one tensor."""
        ...


class TensorFiles:
    """Tensors of a checkpoint directory, read by name; nothing is kept. Raises `ModelError`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / INDEX
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [FILE]
            opened = [safe_open(directory / name, framework="pt") for name in names]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"model {str(directory)!r} cannot be loaded: {error}") from error
        self._file_of = {name: file for file in opened for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def whole(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._file_of[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of one tensor."""
        tensor: Tensor = self._file_of[name].get_slice(name)[rows]  # type: ignore[no-untyped-call]
        return tensor
