"""Ranks: processes that train one model together, with weights and moments sharded over them (FSDP2).

Every rank gets every request and all rows. Each rank computes the same packing, then its share of the micro-batches;
gradients and statistics are summed. Token weights depend on the whole update (`packing.token_weight`), so any number of
ranks gives the same gradient. Ranks wait for each other in every layer, so all ranks must do the same work in the same
order.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from anyio.from_thread import start_blocking_portal
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.errors import ChildDied
from shoal.net.process import Child, rank_environment
from shoal.trainer.messages import ANSWER_TIMEOUT_S, Answer, TrainerFailed, answer_from

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)
"""Longest wait of a rank for another in one collective."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `index` of `count`; the first rank writes files and answers."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files."""
        return self.index == 0

    def shard(self, model: nn.Module, device: str) -> None:
        """Shards every tensor of the model over the ranks; a tensor is whole while its layer computes."""
        if self.count == 1:
            return
        mesh = init_device_mesh(torch.device(device).type, (self.count,))
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """Items that this rank computes; all ranks get equally many when their number divides the items."""
        return things[self.index :: self.count]

    def add_up(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over the ranks."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def mean_and_deviation(self, streams: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (with n) of the numbers of all ranks, float64."""
        x_T = torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *streams])
        sums = torch.stack([x_T.sum(), x_T.new_tensor(len(x_T))])
        self.add_up(sums)
        mean, count = sums[0] / sums[1].clamp(min=1), sums[1].clamp(min=1)
        squares = (x_T - mean).square().sum()
        self.add_up(squares)
        return mean, (squares / count).sqrt()

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


def join(index: int, count: int, meeting: Path, device: str) -> Ranks:
    """Meets the other ranks through a file that does not exist yet; returns when all ranks are there."""
    # All ranks are on this machine: no other host need connect.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=index, world_size=count, timeout=PATIENCE
    )
    return Ranks(index, count)


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


def local(tensor: Tensor) -> Tensor:
    """Part of the tensor on this rank; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm(parts: Iterable[Tensor], *, sharded: bool) -> float:
    """Norm of all numbers in the parts of all ranks; float64 sums."""
    squares = [part.square().sum(dtype=torch.float64) for part in parts]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if sharded:
        distributed.all_reduce(total)
    return float(total.sqrt())


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Tensor on the device of `other`, sharded as `other` is."""
    if not isinstance(other, DTensor):
        return tensor.to(other.device)
    # Every rank has read the whole tensor, so nothing is sent.
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


class Followers:
    """Ranks 1 .. count - 1, started at construction; they end with this process."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="shoal-ranks-")
        self.meeting = Path(self._stack.enter_context(folder)) / "meeting"
        """File through which the ranks find each other."""
        signal.signal(signal.SIGTERM, self._terminated)
        self._portal = self._stack.enter_context(start_blocking_portal())
        children = [self._child(rank) for rank in range(1, count)]
        self._all = [self._stack.enter_context(self._portal.wrap_async_context_manager(child)) for child in children]

    def _child(self, rank: int) -> Child:
        where = [f"--rank={rank}", f"--meeting={self.meeting}"]
        return Child(f"rank {rank}", "shoal.trainer.worker", where, None, rank_environment(rank), own_group=False)

    def send(self, frame: bytes) -> None:
        """Sends a request to all ranks. Raises `ChildDied`."""
        for index, follower in enumerate(self._all, 1):
            if self._portal.call(follower.closed):
                raise ChildDied(f"rank {index} of the trainer has ended")
            self._portal.call(follower.send, frame)

    def agreed(self, own: Answer) -> Answer:
        """Answer on which the ranks agree: this rank's, or a follower's failure if only the follower failed."""
        for index, follower in enumerate(self._all, 1):
            try:
                answer = answer_from(self._portal.call(follower.receive, ANSWER_TIMEOUT_S))
            except (ChildDied, TimeoutError):
                own = TrainerFailed(f"rank {index} of the trainer: it has ended")
                continue
            if isinstance(answer, TrainerFailed) and not isinstance(own, TrainerFailed):
                own = TrainerFailed(f"rank {index} of the trainer: {answer.reason}")
        return own

    def _terminated(self, number: int, _: FrameType | None) -> None:
        """Ends this process as the signal would have, and removes the folder first."""
        shutil.rmtree(self.meeting.parent, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end(self) -> None:
        """Ends the ranks."""
        self._stack.close()
