"""A transformers model with fewer operations, which computes the same to rounding and has the same tensors by name.

A decode step of a small model is hundreds of operations of some microseconds each. Linear layers that are given the
same input become one product, and norms one call; the names and the in-place loading of weights stay as they were.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that transformers' models give one input, in this order."""


def fused(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with its modules replaced where that changes nothing."""
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [part for name in names if type(part := getattr(parent, name, None)) is nn.Linear]
            if len(linears) == len(names) and _alike(linears):
                joint = _Joint(linears)
                for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
                    setattr(parent, name, _Part(joint, index, linear))
        for name, child in list(parent.named_children()):
            norm = _one_call(child)
            if norm is not None:
                setattr(parent, name, norm)
    return model


class _Joint:
    """Linear layers of one input as one product: the first that is asked computes it for all.

    Their weights become views of the joint one, so that whoever writes into them writes into it.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        self._weight = torch.cat([linear.weight.data for linear in linears])
        has_bias = linears[0].bias is not None
        self._bias = torch.cat([linear.bias.data for linear in linears]) if has_bias else None
        for linear, weight in zip(linears, torch.split(self._weight, self._sizes), strict=True):
            linear.weight.data = weight
        for linear, bias in (
            zip(linears, torch.split(self._bias, self._sizes), strict=True) if self._bias is not None else ()
        ):
            linear.bias.data = bias
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()

    def output(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` makes of `x`."""
        if self._input is not x:
            self._input = x
            self._outputs = torch.split(F.linear(x, self._weight, self._bias), self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:  # nothing is held between forwards
            self._input, self._outputs = None, ()
        return output


class _Part(nn.Module):
    """One layer of a joint product, with the tensors of the layer that it replaces."""

    def __init__(self, joint: _Joint, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._joint, self._index = joint, index

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return self._joint.output(self._index, x)


def _alike(linears: Sequence[nn.Linear]) -> bool:
    """Whether they can take one input, all with a bias or all without."""
    return len({(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in linears}) == 1


def _one_call(norm: nn.Module) -> nn.Module | None:
    """The torch module that computes what an RMS norm does; None when there is none.

    Tried on random numbers, because models write norms in many ways. In bfloat16 theirs round once more: they stay.
    """
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not (type(norm).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and isinstance(eps, float)):
        return None
    if weight.dtype is not torch.float32 or len(list(norm.parameters())) != 1:
        return None
    candidate = nn.RMSNorm(weight.shape[0], eps=eps, device="meta")
    candidate.weight = weight
    numbers = torch.Generator().manual_seed(0)
    x_4W = torch.randn(4, weight.shape[0], generator=numbers).to(weight.device)
    # A fresh norm's weight may hide what it does with it.
    other_W = torch.rand(weight.shape[0], generator=numbers).to(weight.device) + 0.5
    with torch.no_grad():
        kept_W = weight.clone()
        weight.copy_(other_W)
        same = torch.allclose(norm(x_4W), candidate(x_4W), rtol=1e-5, atol=1e-6)
        weight.copy_(kept_W)
    return candidate if same else None
