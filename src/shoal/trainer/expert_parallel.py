"""Expert parallelism: each rank keeps some experts of every layer whole, and tokens travel to their experts and back.

    rows of this rank --router--> token, expert --all-to-all--> experts of this rank --all-to-all--> weighted sum

Sharding (`ranks`) would gather all experts of a layer on every rank. Here weights, gradients and moments of an expert
stay on its rank. The experts compute as transformers wrote them, on the tokens of all ranks.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from shoal.errors import ConfigError


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leaves every rank its experts; returns their parameters, which nothing else may shard.

    The last axis of the mesh spreads experts, one before it copies them. Raises `ConfigError` for a model without
    experts that transformers packs in one tensor, and for ranks that do not divide them.
    """
    found = list(_experts(model))
    if not found:
        raise ConfigError(f"train.backend: expected a mixture of experts for 'experts', got {type(model).__name__}")
    ranks, placements = mesh.size(mesh.ndim - 1), [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    spread: set[nn.Parameter] = set()
    for experts in found:
        count = int(experts.num_experts)  # type: ignore[arg-type]
        if count % ranks:
            raise ConfigError(f"train.backend: expected a number of ranks that divides {count} experts, got {ranks}")
        for name, parameter in list(experts.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
            setattr(experts, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        spread.update(experts.parameters(recurse=False))
        experts.num_experts = count // ranks  # type: ignore[assignment]
        experts.forward = partial(_forward, _Own(experts), mesh)
    return spread


def _experts(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose parameters all have experts as first axis, as in transformers."""
    for module in model.modules():
        count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        if own and type(module).__name__.endswith("Experts") and all(one.shape[0] == count for one in own):
            yield module


class _Own(nn.Module):
    """Experts of this rank, computed by the class that they have."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *given: Tensor) -> Tensor:
        return type(self.experts).forward(self.experts, *given)  # type: ignore[no-any-return]


def _forward(own: _Own, mesh: DeviceMesh, hidden_TW: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Replaces the forward of the experts; each token's chosen experts are in [T, k], as are their weights."""
    group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    held = int(own.experts.num_experts)  # type: ignore[arg-type]
    chosen_C, k = top_k_index.flatten(), top_k_index.shape[1]
    order_C = chosen_C.argsort(stable=True)
    sent = chosen_C.new_zeros(ranks).index_add_(0, chosen_C // held, torch.ones_like(chosen_C))
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    # The sizes of what travels must be known on the host: the only numbers that are read in a pass.
    to, back = torch.stack([received, sent]).tolist()
    index_C = order_C.new_empty(sum(to))
    distributed.all_to_all_single(index_C, chosen_C[order_C] % held, to, back, group=group)
    token_C = order_C // k
    rows_CW = _exchanged(hidden_TW[token_C], to, back, group)
    # One row more, of no weight: every rank computes something, so that the ways back are the same everywhere.
    rows_CW = torch.cat([rows_CW, rows_CW.new_zeros(1, rows_CW.shape[1])])
    index_C1 = torch.cat([index_C, index_C.new_zeros(1)])[:, None]
    # The grouped products of experts have the dtype of their weights.
    dtype = hidden_TW.dtype
    weights = {
        f"experts.{name}": _local(one, mesh).to(dtype) for name, one in own.experts.named_parameters(recurse=False)
    }
    ones_C1 = torch.ones_like(index_C1, dtype=top_k_weights.dtype)
    out_CW = functional_call(own, weights, (rows_CW, index_C1, ones_C1))[:-1]
    out_CW = _exchanged(out_CW, back, to, group) * top_k_weights.flatten()[order_C, None]
    return torch.zeros_like(hidden_TW).index_add(0, token_C, out_CW.to(hidden_TW.dtype))


class _Exchanged(torch.autograd.Function):
    """Rows that other ranks have for this one; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], back: list[int], group: ProcessGroup) -> Tensor:
        """`to` are the numbers of rows from each rank, `back` those for each of them."""
        ctx.sizes, ctx.group = (to, back), group
        out = rows.new_empty(sum(to), rows.shape[1])
        distributed.all_to_all_single(out, rows.contiguous(), to, back, group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        to, back = ctx.sizes
        return _exchanged(gradients[0], back, to, ctx.group), None, None, None


def _exchanged(rows: Tensor, to: list[int], back: list[int], group: ProcessGroup) -> Tensor:
    return _Exchanged.apply(rows, to, back, group)  # type: ignore[no-any-return, no-untyped-call]


def _local(parameter: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    """Weights of this rank's experts; their gradient is the mean over all ranks, as for sharded weights."""
    assert isinstance(parameter, DTensor)
    weights = parameter.to_local()
    if weights.requires_grad:
        weights.register_hook(partial(_mean, mesh))  # type: ignore[no-untyped-call]
    return weights


def _mean(mesh: DeviceMesh, gradient: Tensor) -> Tensor:
    gradient = gradient / mesh.size()
    if mesh.ndim > 1:  # copies of these experts on other hosts saw other tokens
        distributed.all_reduce(gradient, group=mesh.get_group(0))
    return gradient
