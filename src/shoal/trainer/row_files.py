"""Safetensors files that several ranks write and read, each its own rows, and the fingerprint of rows.

The fingerprint is equal for equal bits, however many ranks hold them:

    sum over all pairs of numbers of   64 bits * factor of the pair in its block * factor of the block   modulo 2**64

The factors are odd and pseudo-random (multilinear hashing, Carter and Wegman 1979). One changed number always changes
the sum; other changes go unseen with a probability of about 2**-30. Sums of integers do not depend on their order, so a
device computes its part without moving a weight. It is no protection against somebody who chooses weights.

transformers packs experts into one tensor, [E, ...], whose rows are experts. A rank splits its experts and numbers
them from its first one. Tensors that a checkpoint joins or cuts otherwise are gathered by the first rank.

    model.safetensors        trained tensors
    optimizer.safetensors    moments and counters

Any number of ranks reads what any other has written. A checkpoint counts once `experience.checkpoint.seal` has named
its directory: a crash leaves none half.

    header | tensor a: rows of rank 0, rows of rank 1, ... | tensor b: ...

Rows of a tensor follow one another in a file, so rows of a rank are a byte range of it. Every rank knows the header
and writes its ranges in place. The file has the bytes that one writer would give it once all ranks have written.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from shoal.errors import TrainerError
from shoal.files import HEAD_BYTES
from shoal.model.checkpoint_names import checkpoint_tensors
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
        if rows.start < rows.stop and not any(map(mesh.get_local_rank, range(mesh.ndim - 1))):
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


@dataclass(frozen=True, slots=True)
class VersionRows:
    """How a model's tensors lie in the file of a Version."""

    layout: RowLayout
    model: PreTrainedModel
    names: Mapping[str, tuple[str, ...]]
    """Checkpoint names of a tensor: one, or one per expert."""

    @classmethod
    def of(cls, model: PreTrainedModel, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> "VersionRows":
        """RowLayout of the model's tensors, of which only dtype and shape are read; numbers become `dtype`."""
        empty = {name: _empty(one, dtype) for name, one in tensors.items()}
        whole = checkpoint_tensors(model, empty)
        names = {name: found for name, one in empty.items() if (found := _names(model, name, one, whole))}
        return cls(RowLayout.of(whole), model, names)

    def rows(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, ranks: Ranks) -> Iterator[Rows]:
        """Rows that this rank writes. All ranks exhaust it, in the same order."""
        apart = {name: one for name, one in tensors.items() if name in self.names}
        for one in rows_of(apart, ranks):
            values, names = _cast(one.values, dtype), self.names[one.name]
            if len(names) == 1:
                yield Rows(names[0], one.first, values)
                continue
            experts, of_all = len(values), int(tensors[one.name].shape[0])
            for index, split in enumerate(checkpoint_tensors(self.model, {one.name: values}).values()):
                kind, expert = divmod(index, experts)
                yield Rows(names[kind * of_all + one.first + expert], 0, split)
        joint = ranks.gather({name: one for name, one in tensors.items() if name not in self.names})
        for name, whole in checkpoint_tensors(self.model, joint).items() if joint else ():
            yield Rows(name, 0, _cast(whole, dtype))


def _names(model: PreTrainedModel, name: str, tensor: Tensor, whole: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of a tensor in the checkpoint, or of each of its rows, if it has nothing to do with other tensors."""
    try:
        found = checkpoint_tensors(model, {name: tensor})
        of_one = checkpoint_tensors(model, {name: tensor[:1]}) if len(found) > 1 else {}
    except (RuntimeError, ValueError, KeyError, AttributeError):  # it is made of several
        return ()
    if any(key not in whole or whole[key].shape != one.shape for key, one in found.items()):
        return ()
    names = tuple(found)
    if len(names) == 1:  # the tensor keeps its name: a converter would have made another tensor
        return names if found[names[0]] is tensor else ()
    by_row = all(one.ndim == tensor.ndim - 1 for one in found.values()) and names[:: len(tensor)] == tuple(of_one)
    return names if by_row else ()


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


BLOCK = 1 << 16
"""Pairs of numbers in one pass: a few passes stay in a core's cache."""


def fingerprint(tensors: Mapping[str, Tensor], ranks: Ranks) -> str:
    """Sixteen hexadecimal digits of the bits of float32 tensors by name. All ranks call it."""
    device = next(iter(tensors.values())).device
    factors_B = _odd(torch.arange(BLOCK, dtype=torch.int64) * 2 + _number("places")).to(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for rows in rows_of(tensors, ranks):
        total += part(rows, factors_B)
    ranks.add_up(total)
    return f"{int(total) % 2**64:016x}"


def part(rows: Rows, factors_B: Tensor) -> Tensor:
    """Sum of some rows of a tensor, int64, modulo 2**64; `factors_B` are those of a block's pairs."""
    values = rows.values.detach()
    bits_N = values.contiguous().reshape(-1).view(torch.int32)
    first = rows.first * (len(bits_N) // max(1, len(values)) if values.ndim else 1)
    odd = first % 2, (first + len(bits_N)) % 2  # halves of pairs; a view needs even offsets
    if any(odd) or bits_N.storage_offset() % 2:
        bits_N = torch.cat([bits_N.new_zeros(odd[0]), bits_N, bits_N.new_zeros(odd[1])])
    pairs_N, at, total = bits_N.view(torch.int64), 0, torch.zeros_like(factors_B[0])
    blocks = range(first // 2 // BLOCK, (first // 2 + len(pairs_N)) // BLOCK + 1)
    factor_of = dict(zip(blocks, _odd(torch.tensor(blocks) * 2 + _number(rows.name)).tolist(), strict=True))
    while at < len(pairs_N):
        block, place = divmod(first // 2 + at, len(factors_B))
        some_N = pairs_N[at : at + BLOCK - place]
        total += (some_N * factors_B[place : place + len(some_N)]).sum() * factor_of[block]
        at += len(some_N)
    return total


def _number(name: str) -> int:
    """Even number of 62 bits that belongs to a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 2 & ~1


def _signed(number: int) -> int:
    """The int64 with the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _odd(number: Tensor) -> Tensor:
    """Pseudo-random odd int64 for each int64: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return (number ^ ((number >> 31) & (2**33 - 1))) | 1
