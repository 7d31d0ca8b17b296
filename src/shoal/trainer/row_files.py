"""Safetensors files that several ranks write and read: each rank its own rows, and none holds a whole model.

    header | tensor a: rows of rank 0, rows of rank 1, ... | tensor b: ...

Rows of a tensor follow one another in a file, so rows of a rank are a byte range of it. Every rank knows the header
and writes its ranges in place. The file has the bytes that one writer would give it once all ranks have written.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.errors import TrainerError
from shoal.files import HEAD_BYTES
from shoal.trainer.messages import RANGES
from shoal.trainer.ranks import Ranks, own_rows, rows_here

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Names of dtypes, in the order of safetensors: its files begin with the last ones."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor, from `first` on."""

    name: str
    first: int
    values: Tensor

    def copied(self) -> "Rows":
        """Rows whose values no step changes."""
        return replace(self, values=self.values.detach().to("cpu", copy=True))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Header of a file, and where each tensor begins in it."""

    header: bytes
    begins: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "RowLayout":
        """RowLayout of tensors, of which only dtype and shape are read, as safetensors itself orders them."""
        ranking = list(DTYPES)
        order = sorted(tensors, key=lambda name: (-ranking.index(tensors[name].dtype), name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for name in order:
            begins[name], one = end, tensors[name]
            end += one.numel() * one.element_size()
            entries[name] = {"dtype": DTYPES[one.dtype], "shape": [*one.shape], "data_offsets": [begins[name], end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end)


def rows_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> Iterator[Rows]:
    """Rows that this rank writes: its own of a sharded tensor, which one host writes; the first rank writes others.

    All ranks exhaust it, in the same order.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if ranks.first:
                yield Rows(name, 0, tensor)
            continue
        mesh = tensor.device_mesh
        one = tensor.redistribute(
            mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        )  # merged adapters may lie otherwise
        rows = rows_here(one)
        if rows.start < rows.stop and (mesh.ndim == 1 or mesh.get_local_rank(0) == 0):
            yield Rows(name, rows.start, one.to_local())


def write_rows(path: Path, layout: RowLayout, rows: Iterable[Rows], ranks: Ranks) -> None:
    """Writes rows at their places, durably; the first rank writes the header. Raises `TrainerError`."""
    ranges: list[list[int]] = []
    coming = iter(rows)
    try:
        path.touch()
        with path.open("r+b", buffering=0) as file:
            if ranks.first:
                file.truncate(layout.size)
                _place(file, layout.header, 0, ranges)
            for one in coming:
                values = one.values.detach().cpu().contiguous()
                row_bytes = values.nbytes // max(1, len(values)) if values.ndim else 0
                data = memoryview(values.reshape(-1).view(torch.uint8).numpy().data)
                _place(file, data, layout.begins[one.name] + one.first * row_bytes, ranges)
            os.fsync(file.fileno())
        if ranks.count > 1 and not ranks.shared_disk:
            path.with_name(path.name + RANGES).write_text(json.dumps(sorted(ranges)))
    except OSError as error:
        for _ in coming:  # other ranks may wait for a part of this one
            pass
        raise TrainerError(f"{path}: cannot be written: {error}") from error


def _place(file: FileIO, data: "bytes | memoryview", offset: int, ranges: list[list[int]]) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file.fileno(), data[done:], offset + done)
    if ranges and sum(ranges[-1]) == offset:
        ranges[-1][1] += len(data)
    else:
        ranges.append([offset, len(data)])


def ranges_here(path: Path, alike: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    """Offset and size of each range after the header that `read_rows` reads; the file may have its header only.

    Raises `TrainerError`.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(HEAD_BYTES), "little")
            entries: dict[str, dict[str, list[int]]] = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path}: expected a file that the trainer saved: {error}") from error
    ranges = list[tuple[int, int]]()
    for name in entries.keys() - {"__metadata__"}:
        begin, end = (HEAD_BYTES + size + offset for offset in entries[name]["data_offsets"])
        here = alike.get(name)
        if isinstance(here, DTensor):
            rows, row_bytes = rows_here(here), (end - begin) // max(1, here.shape[0])
            begin, end = begin + rows.start * row_bytes, begin + rows.stop * row_bytes
        if begin < end:
            ranges.append((begin, end - begin))
    return tuple(sorted(ranges))


def read_rows(path: Path, alike: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads the tensors of a file; of a tensor that is sharded in `alike` this rank's rows only.

    Raises `TrainerError`, too for a sharded tensor of another shape.
    """
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                here = alike.get(name)
                if not isinstance(here, DTensor):
                    found[name] = file.get_tensor(name)
                    continue
                held = file.get_slice(name)
                if tuple(held.get_shape()) != tuple(here.shape):
                    raise TrainerError(f"{path}: expected {name} of {[*here.shape]}, got {held.get_shape()}")
                found[name] = own_rows(held[rows_here(here)].to(here.device), here)
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"{path}: expected a file that the trainer saved: {error}") from error
    return found
