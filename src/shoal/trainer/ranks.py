"""Ranks: processes that train one model together, its weights and moments sharded over them (FSDP2).

Every rank is asked the same and gets all rows. Each works out the same packing and computes its share of the
micro-batches; gradients and statistics are added up. Since the tokens' weights come from the whole update
(`reduction.py`), any number of ranks gives the same gradient. Ranks wait for each other in every layer, so all of them
must do the same things in the same order.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another in one collective."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `count` ranks; the first of them writes files and answers."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.index == 0

    def shard(self, model: nn.Module, device: str) -> None:
        """Keeps a part of every tensor of the model, which is whole while a layer computes."""
        if self.count == 1:
            return
        mesh = init_device_mesh(torch.device(device).type, (self.count,))
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """Those that this rank computes: as many as every other rank when the ranks divide them."""
        return things[self.index :: self.count]

    def add_up(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over the ranks."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def mean_and_deviation(self, streams: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (with n) of the numbers of all ranks, float64."""
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for stream in streams:
            sums += torch.stack([stream.sum(dtype=torch.float64), sums.new_tensor(stream.numel())])
        self.add_up(sums)
        mean, count = sums[0] / sums[1].clamp(min=1), sums[1].clamp(min=1)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for stream in streams:
            squares += (stream.double() - mean).square().sum()
        self.add_up(squares)
        return mean, (squares / count).sqrt()

    def largest(self, tensor: Tensor) -> None:
        """Replaces the tensor by its maximum over the ranks."""
        if self.count > 1:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors unsharded, in the main memory of the first rank; nothing on the others, which ask as well."""
        result = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self.first:
                result[name] = full.cpu() if self.count > 1 else full
        return result


ALONE = Ranks()


def join(index: int, count: int, meeting: Path, device: str) -> Ranks:
    """Meets the other ranks through a file that does not exist yet; returns when all are there."""
    # All ranks are on this machine: nobody else need be able to connect.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=index, world_size=count, timeout=PATIENCE
    )
    return Ranks(index, count)


def leave() -> None:
    """Ends what `join` began, if it did."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """A tensor, put together from the ranks' parts if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a part of it only."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm(parts: Iterable[Tensor], *, sharded: bool) -> float:
    """Of all numbers in the parts of all ranks, each part taken by itself; float64 sums."""
    squares = [part.square().sum(dtype=torch.float64) for part in parts]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if sharded:
        distributed.all_reduce(total)
    return float(total.sqrt())


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, sharded if the other one is; on the device of the other one."""
    if not isinstance(other, DTensor):
        return tensor.to(other.device)
    # Every rank has read the whole tensor: nothing need be sent.
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
