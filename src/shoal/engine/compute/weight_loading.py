"""Loading of weights from disk into a served model: all checks precede the first change of a number.

Weights are those of the whole model, or a low-rank adapter in the form of peft, which is merged into the weights with
which the model was loaded: W' = W + (alpha / rank) B A. The files of these weights stay on the disk and are mapped.
"""

import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from shoal import files
from shoal.engine.compute.adapters import NamedAdapter, Products, joint_pairs, low_rank_pairs
from shoal.errors import ModelError, RequestRefused
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.model.checkpoint_names import model_tensors
from shoal.model.tensor_files import TensorFiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of a file's tensors; the model's may differ. Smaller floats would be numbers without their scales."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Tensors of one Version, mapped from their file and checked against their model."""

    version: int
    checksum: str
    tensors: dict[str, Tensor]
    adapted: bool = False
    """Whether all other tensors are those with which the model was loaded."""


def weight_file(path: Path) -> Path:
    """Safetensors file that a path names: the path itself, or the file in that directory."""
    if not os.path.isdir(path):  # `Path.is_dir` raises for a name that is too long
        return path
    is_adapter = os.path.exists(path / ADAPTER_FILE) and not os.path.exists(path / MODEL_FILE)
    return path / (ADAPTER_FILE if is_adapter else MODEL_FILE)


def check_below(path: Path, folders: Sequence[Path]) -> None:
    """Raises `RequestRefused` for a file whose real path, after links, is not below one of the resolved folders."""
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise RequestRefused(f"weights {path} cannot be read: {error}") from error
    if not any(real.is_relative_to(folder) for folder in folders):
        known = ", ".join(map(str, folders)) or "none"
        raise RequestRefused(f"weights {path}: expected a path below a folder given as --weights ({known})")


def tensors_at(path: Path, checksum: str | None) -> tuple[Path, str, dict[str, Tensor]]:
    """Safetensors file that a path names, its checksum and its tensors, mapped.

    The expected checksum is the argument, or else the content of the file `checksum` in its folder. Raises
    `RequestRefused` for a path that is not a regular file, or has a wrong checksum.
    """
    try:
        file = weight_file(path)
        if file.exists() and not file.is_file():  # reading a device or a pipe may never end
            raise RequestRefused(f"weights {file}: expected a regular file")
        actual = files.checksum(file)
        recorded = file.with_name("checksum")
        expected = checksum or (recorded.read_text().strip() if recorded.is_file() else actual)
        if actual != expected and not files.has_checksum(file, expected):
            raise RequestRefused(f"weights {file}: expected checksum {expected}, got {actual}; write them again")
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:  # a path with a NUL is a ValueError
        raise RequestRefused(f"weights {path} cannot be read: {error}") from error
    return file, actual, tensors


class WeightSlots:
    """Tensors of a model that weights are loaded into, in place.

    Parameters keep their storage, so tied parameters stay tied: one write to an embedding that is also the head changes
    both. An engine that replaces parameters instead serves a stale head.
    """

    def __init__(self, model: PreTrainedModel, products: Products | None = None) -> None:
        """`products` are those of the forward that uses named adapters."""
        self._model, self._products = model, products or {}
        self._base = Path(model.name_or_path)
        self._changed: set[str] = set()  # tensors that no longer have the numbers with which the model was loaded
        self._tensors: dict[str, Tensor] = model.state_dict()
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._aliases.setdefault(tensor.data_ptr(), []).append(name)

    def staged(self, version: int, path: Path, checksum: str | None) -> StagedWeights:
        """Maps and checks a file without touching the model; safe in another thread than the computing one.

        Raises `RequestRefused` as `tensors_at` does, and for tensors other than exactly this model's, or with numbers
        that are not finite.
        """
        file, actual, tensors = tensors_at(path, checksum)
        if file.name == ADAPTER_FILE:
            tensors = self._merged(file, tensors)
            self._check_each(file, tensors)
            return StagedWeights(version, actual, tensors, adapted=True)
        if not tensors.keys() <= self._tensors.keys():
            try:
                tensors = model_tensors(self._model, tensors)
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise RequestRefused(f"weights {file}: experts cannot be packed: {reason}") from error
        self._check(file, tensors)
        return StagedWeights(version, actual, tensors)

    def adapter(self, name: str, version: int, path: Path, checksum: str | None) -> NamedAdapter:
        """Reads and checks an adapter that is to be loaded by name; safe in any thread. Raises `RequestRefused`."""
        file, _, tensors = tensors_at(path, checksum)
        pairs = low_rank_pairs(file, tensors, self._tensors)
        like = self._model.get_input_embeddings().weight
        return NamedAdapter(name, version, joint_pairs(pairs, self._products, like))

    @torch.inference_mode()
    def load(self, weights: StagedWeights) -> None:
        """Copies staged tensors into the model."""
        tensors = weights.tensors
        if weights.adapted and (others := self._changed - tensors.keys()):
            tensors = {**self._base_tensors(others), **tensors}
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)
        self._changed = set(weights.tensors)

    def _base_tensors(self, names: Set[str]) -> dict[str, Tensor]:
        """Tensors with which the model was loaded. Raises `RequestRefused` for one that its files lack."""
        try:
            files = TensorFiles(self._base)
        except ModelError as error:
            raise RequestRefused(f"an adapter needs the files of its base model: {error}") from error
        lacking = sorted(names - set(files))
        if lacking:
            raise RequestRefused(
                f"adapters of {lacking[0]!r} cannot be served: {self._base} has no tensor of that name"
            )
        return {name: files.whole(name) for name in names}

    @torch.no_grad()
    def _merged(self, file: Path, adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of the adapted layers, in the model's dtype. Raises `RequestRefused` for another model's adapter."""
        pairs = low_rank_pairs(file, adapter, self._tensors)
        base = self._base_tensors({f"{layer}.weight" for layer in pairs})
        return {
            (name := f"{layer}.weight"): torch.addmm(base[name].float(), b_OR, a_RD).to(self._tensors[name].dtype)
            for layer, (a_RD, b_OR) in pairs.items()
        }

    def _check(self, file: Path, tensors: dict[str, Tensor]) -> None:
        unknown = sorted(tensors.keys() - self._tensors.keys())
        if unknown:
            raise RequestRefused(f"weights {file}: the model has no tensor {unknown[0]!r}")
        for names in self._aliases.values():
            given = [name for name in names if name in tensors]
            if not given:
                raise RequestRefused(f"weights {file}: tensor {names[0]!r} is missing")
            if any(not torch.equal(tensors[given[0]], tensors[name]) for name in given[1:]):
                raise RequestRefused(f"weights {file}: {given[0]!r} and {given[1]!r} are tied here but differ there")
        self._check_each(file, tensors)

    def _check_each(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.shape != self._tensors[name].shape:
                expected = list(self._tensors[name].shape)
                raise RequestRefused(f"weights {file}: {name!r}: expected shape {expected}, got {list(tensor.shape)}")
            if tensor.dtype not in (*DTYPES, self._tensors[name].dtype):
                known = ", ".join(map(str, DTYPES))
                raise RequestRefused(f"weights {file}: {name!r}: expected one of {known}, got {tensor.dtype}")
            if not _is_finite(tensor):
                raise RequestRefused(f"weights {file}: {name!r} holds numbers that are not finite")


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and no infinity; NaN is passed on by both extremes.

    In bfloat16 `isfinite` takes 22 times as long.
    """
    return not tensor.numel() or not tensor.is_floating_point() or all(map(math.isfinite, tensor.aminmax()))
