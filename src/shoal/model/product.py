"""Products of linear layers, with weights in the processor's fastest layout for bfloat16.

oneDNN reads a weight in blocks. Of a plain weight it makes them anew in every call: with those of SmolLM2 a product of
32 rows takes 1.2 times as long, of 536 rows 1.1 times, and of 8 rows or fewer 1.6 to 2 times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ROWS = 32
"""Rows for which oneDNN chooses the blocks; it reads the same ones for any number."""


def has_blocks(weight: Tensor) -> bool:
    """Whether products of a weight are faster in blocks: bfloat16, on a processor that multiplies it."""
    on_cpu = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    return on_cpu and bool(torch.backends.mkldnn.is_available() and _mkldnn()._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


class Product:
    """Product with one weight [O, I]. `lay_out` follows each change of the weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, name: str = "") -> None:
        """`name` is that of its first linear layer, by which adapters find it."""
        self.name = name
        self._weight_OI, self._bias_O = weight_OI, bias_O
        self._blocks: Tensor | None = None
        self.lay_out()

    def lay_out(self) -> None:
        """Repacks the weight after an update."""
        if not has_blocks(self._weight_OI):
            return
        blocks = _mkldnn()._reorder_linear_weight(self._weight_OI.contiguous(), _ROWS)
        if self._blocks is None:
            self._blocks = blocks
        else:  # in place: glibc finds no kept room for an aligned block of the same size
            self._blocks.copy_(blocks)

    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:
        """Product [T, O] with the bias; without a bias also added to a residual stream."""
        if self._blocks is None:
            if residual_TO is None:
                return F.linear(x_TI, self._weight_OI, self._bias_O)
            return torch.addmm(residual_TO, x_TI, self._weight_OI.t())
        linear = _mkldnn()._linear_pointwise
        if residual_TO is None:
            found: Tensor = linear(x_TI, self._blocks, self._bias_O, "none", [], "")
        else:
            found = linear.binary(x_TI, residual_TO, self._blocks, None, "add")
        return found


def _mkldnn() -> Any:
    return torch.ops.mkldnn
