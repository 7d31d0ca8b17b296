"""Ranks: processes that train one model together, with weights and moments sharded over them (FSDP2).

Every rank gets every request, and of a step its share of the rows; gradients and statistics are summed. Token weights
depend on the whole update (`packing.token_weight`), so any number of ranks gives the same gradient. Ranks wait for each
other in every layer, so all ranks must do the same work in the same order.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from math import prod
from pathlib import Path

import psutil
import torch
from torch import Tensor, distributed, nn
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.model.loading import resolve_device
from shoal.net.listening import interface_towards
from shoal.trainer.expert_parallel import spread_experts

PATIENCE = timedelta(minutes=10)
"""Longest wait of a rank for another in one collective."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `index` of `count`; the first rank answers, and writes everything that is not sharded."""

    index: int = 0
    count: int = 1
    per_copy: int | None = None
    """Ranks that share one copy of the weights, sharded over them (HSDP); None for all."""
    shared_disk: bool = False
    """Whether all ranks reach the directories in which files are written."""
    experts_apart: bool = False
    """Whether experts stay on their ranks, and tokens travel to them (`expert_parallel`)."""
    per_layer: int = 1
    """Neighbouring ranks that compute the same rows, each with a part of every layer (tensor parallelism)."""

    @property
    def first(self) -> bool:
        """Whether this rank writes what is not sharded."""
        return self.index == 0

    @property
    def shares(self) -> int:
        """Number of parts into which the rows of an update are cut."""
        return self.count // self.per_layer

    @property
    def share(self) -> int:
        """Which of these parts this rank computes."""
        return self.index // self.per_layer

    @property
    def repeats(self) -> bool:
        """Whether another rank counts the rows of this one."""
        return self.index % self.per_layer > 0

    def meet(self, master: str, device: str) -> None:
        """Joins the other ranks at the first rank's address; returns when all ranks have joined."""
        if self.count == 1 or distributed.is_initialized():
            return
        on_gpu = resolve_device(device).startswith("cuda")
        # Both libraries would otherwise pick an interface that may not lead to the other hosts.
        interface = interface_towards(f"tcp://{master}")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{master}",
            rank=self.index,
            world_size=self.count,
            timeout=PATIENCE,
        )

    def dump_collectives(self, prefix: str | None) -> None:
        """Writes the newest collectives of this rank, and which of them ended, to a JSON file of that prefix."""
        if prefix:
            trace = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
            Path(f"{prefix}{self.index}.json").write_bytes(trace)

    def shard(self, model: nn.Module, device: str, dtype: torch.dtype = torch.float32) -> None:
        """Shards every tensor of the model over the ranks; a tensor is whole, and of the `dtype`, while its layer
        computes. Gradients are summed in float32."""
        if self.count == 1:
            return
        mesh = self.mesh(device)
        policy = MixedPrecisionPolicy(None if dtype is torch.float32 else dtype, torch.float32)
        apart = spread_experts(model, mesh) if self.experts_apart else set()
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh, ignored_params=apart, mp_policy=policy)
        fully_shard(model, mesh=mesh, ignored_params=apart, mp_policy=policy)

    def mesh(self, device: str) -> DeviceMesh:
        """Copies and the ranks of each, or all ranks; one mesh, and so one group of connections, for all models."""
        return _mesh(torch.device(device).type, self.count // (self.per_copy or self.count), distributed.group.WORLD)

    def add_up(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over the ranks."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def mean_and_deviation(self, streams: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (with n) of the numbers of all ranks, float64."""
        x_T = torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *streams])
        sums = torch.stack([x_T.sum(), x_T.new_full((), len(x_T))])
        self.add_up(sums)
        mean, count = sums[0] / sums[1].clamp(min=1), sums[1].clamp(min=1)
        squares = (x_T - mean).square().sum()
        self.add_up(squares)
        return mean, (squares / count).sqrt()

    def all_of(self, streams: Sequence[Tensor], device: torch.device | str) -> Tensor:
        """Finite numbers [T] of all ranks."""
        x_T = torch.cat([torch.zeros(0, device=device), *streams])
        if self.count == 1:
            return x_T
        most = torch.tensor(len(x_T), device=device)
        self.largest(most)
        parts = [x_T.new_empty(int(most)) for _ in range(self.count)]
        distributed.all_gather(parts, torch.cat([x_T, x_T.new_full((int(most) - len(x_T),), torch.inf)]))
        gathered_T = torch.cat(parts)
        return gathered_T[gathered_T.isfinite()]

    def least(self, number: int, device: str) -> int:
        """Least of the ranks' numbers, for what all must decide alike."""
        if self.count == 1 or distributed.get_backend() == distributed.Backend.FAKE:
            return number
        found = torch.tensor(number, device=device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return int(found)

    def largest(self, tensor: Tensor) -> None:
        """Replaces the tensor by its maximum over the ranks."""
        if self.count > 1:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers whole tensors into the first rank's main memory; every rank must call it. Other ranks get nothing."""
        result = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self.first:
                result[name] = full.cpu() if self.count > 1 else full
        return result


ALONE = Ranks()


@lru_cache(maxsize=4)
def _mesh(kind: str, copies: int, world: ProcessGroup) -> DeviceMesh:
    shape = (copies, world.size() // copies) if copies > 1 else (world.size(),)
    return init_device_mesh(kind, shape, mesh_dim_names=("copies", "ranks") if copies > 1 else None)


def memory_bytes(device: str, ranks: int) -> int:
    """Memory of a rank's GPU, or on a CPU its share of the main memory."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // ranks


def leave() -> None:
    """Leaves the process group, if `join` made it."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """Whole tensor, gathered from the ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has only a part of the tensor."""
    return isinstance(tensor, DTensor)


def copies(tensor: Tensor) -> int:
    """Number of ranks that hold the same part of the tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    return prod(tensor.device_mesh.size(axis) for axis, one in enumerate(tensor.placements) if one.is_replicate())


def place(tensor: DTensor) -> tuple[slice, ...]:
    """Where the part of this rank lies in the whole tensor: even chunks, as `fully_shard` cuts them."""
    mesh, begins, sizes = tensor.device_mesh, [0] * tensor.ndim, list(tensor.shape)
    # A strided axis cuts what the others have left of its dimension: FSDP shards the parts of split layers.
    for axis, one in sorted(enumerate(tensor.placements), key=lambda pair: isinstance(pair[1], _StridedShard)):
        if isinstance(one, Shard | _StridedShard):
            chunk = -(-sizes[one.dim] // mesh.size(axis))
            skipped = min(mesh.get_local_rank(axis) * chunk, sizes[one.dim])
            begins[one.dim] += skipped
            sizes[one.dim] = min(chunk, sizes[one.dim] - skipped)
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def rows_here(tensor: DTensor) -> slice:
    """Rows of which this rank has a part."""
    return place(tensor)[0]


def own_rows(rows: Tensor, other: DTensor) -> DTensor:
    """Tensor sharded as `other`, from whole rows of which this rank has a part."""
    return DTensor.from_local(
        rows[(slice(None), *place(other)[1:])].contiguous(),
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=other.shape,
        stride=other.stride(),
    )


def local(tensor: Tensor) -> Tensor:
    """Part of the tensor on this rank; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduce_later(model: nn.Module, *, last: bool, keep: bool) -> None:
    """Says whether the next backward pass is the `last` one of an update: then the ranks sum their gradients.

    Before that each rank may `keep` its own whole gradients, in float32. Otherwise the ranks of a copy sum them at
    once, because they have no room, and only copies wait for the last one.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or not keep)
        model.set_requires_all_reduce(last)


def norm(norms: Iterable[Tensor], *, sharded: bool) -> Tensor:
    """Norm of all numbers, from norms of their parts on all ranks; float64 sums."""
    of_parts = list(norms)
    total = torch.stack(of_parts).double().square().sum() if of_parts else torch.zeros((), dtype=torch.float64)
    if sharded:
        distributed.all_reduce(total)
    return total.sqrt()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Tensor on the device of `other`, sharded as `other` is."""
    if isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return tensor.to(other.device)
    # Every rank has read the whole tensor, so nothing is sent.
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
