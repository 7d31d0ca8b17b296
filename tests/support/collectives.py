"""Log of what a trainer sends and multiplies in an update: kind, dtype and bytes, of real or fake tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SENT = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu")


@dataclass
class Log(TorchDispatchMode):
    """Bytes that each kind of collective has on this rank, whole, and the numbers of products."""

    sent: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    """Bytes of the largest tensor of each collective."""
    times: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    products: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        name = func.__name__.partition(".")[0]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if kind := SENT.get(name):
            largest = max(tensors, key=lambda one: one.numel())
            self.sent[kind, largest.dtype] += largest.numel() * largest.element_size()
            self.times[kind, largest.dtype] += 1
        elif name in PRODUCTS:
            self.products[name, tensors[0].dtype] += 1
        return func(*args, **(kwargs or {}))

    def dtypes(self, kind: str) -> set[torch.dtype]:
        """Types of a kind of collective, or of a product."""
        return {dtype for name, dtype in (*self.sent, *self.products) if name == kind}
