"""Forward of Llama-family models for training, with gradients by hand and weights laid out once for each update.

transformers' modules under autocast convert weights and activations at every product. Here activations have the dtype
of the products throughout, and linear layers with the same input are one product. Gradients go from the products into
the parameters' own `grad`, whose dtype is that of the parameters.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.model import family
from shoal.model.mixers import Layout

BLOCK = 1 << 19
"""Numbers of a gradient computed at a time: a block is added before it leaves the caches. A training step of SmolLM2
takes 9.8 s so, and 10.4 s with blocks of 2^20."""
SMALL = 1 << 16
"""Numbers of a weight up to which its gradient is made in the backward pass, whole, because more care takes longer."""


class JointLinear:
    """Linear layers with the same input, as one product in a dtype that may differ from the parameters'.

    Parameters of that dtype become views of the joint weight; of others there is a copy, which `lay_out` makes.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], dtype: torch.dtype, *, small: int = SMALL, block: int = BLOCK
    ) -> None:
        self._small, self._block = small, block
        self._weights = [cast("nn.Parameter", linear.weight) for linear in linears]
        self._biases = [linear.bias for linear in linears if linear.bias is not None]
        self._copied = self._weights[0].dtype != dtype
        if self._copied:
            rows = sum(map(len, self._weights))
            self.weight_OI = self._weights[0].new_empty((rows, self._weights[0].shape[1]), dtype=dtype)
            self.bias_O = self._weights[0].new_empty(rows, dtype=dtype) if self._biases else None
        elif len(linears) > 1:
            self.weight_OI = family.joint(self._weights)
            self.bias_O = family.joint(self._biases) if self._biases else None
        else:
            self.weight_OI = self._weights[0].detach()
            self.bias_O = self._biases[0].detach() if self._biases else None
        self._room: list[Tensor] = []

    @property
    def first(self) -> nn.Parameter:
        """First weight; it represents all in checks of gradients."""
        return self._weights[0]

    @torch.no_grad()
    def lay_out(self) -> None:
        """Copies the parameters."""
        if not self._copied:
            assert self.first.data_ptr() == self.weight_OI.data_ptr(), "the parameters have other storage now"
            return
        _copy(self._weights, self.weight_OI)
        if self.bias_O is not None:
            _copy(self._biases, self.bias_O)

    def make_room(self) -> None:
        """Makes the memory of the next gradients, unless the weights are small or have some.

        Made in a backward pass, they would lie between activations, whose places the next ones would not fit.
        """
        if self.weight_OI.numel() <= self._small or self._room:
            return
        if torch.is_grad_enabled() and self.first.requires_grad and self.first.grad is None:
            self._room = [torch.empty_like(weight) for weight in self._weights]

    def add_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> None:
        """Adds to the parameters' gradients."""
        if not self.first.requires_grad:
            return
        if self.bias_O is not None:
            _add_whole(self._biases, grad_TO.sum(0, dtype=torch.float32))
        if self.weight_OI.numel() <= self._small:
            _add_whole(self._weights, grad_TO.t() @ x_TI)
            return
        fresh, self._room = _without_gradient(self._weights, self._room), []
        rows = max(1, self._block // x_TI.shape[1])
        for start in range(0, grad_TO.shape[1], rows):
            _add(self._weights, grad_TO[:, start : start + rows].t() @ x_TI, start, fresh)


class TrainingForward(family.FamilyForward[JointLinear]):
    """Forward of a Llama-family model with products in `dtype`.

    Requires that `family.is_known` accepts the model, that its parameters keep their storage, and that `lay_out`
    follows each change of them. Their counts of changes would not do: fused optimizers leave these alone.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, *, small: int = SMALL, block: int = BLOCK) -> None:
        joint = partial(JointLinear, dtype=dtype, small=small, block=block)
        super().__init__(model, joint)
        self._dtype = dtype
        self._head = joint([model.get_output_embeddings()])
        self._products.append(self._head)
        self.lay_out()

    def lay_out(self) -> None:
        """Repacks the weights after an update of the parameters."""
        for linear in self._products:
            linear.lay_out()

    def hidden(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_U: Tensor) -> Tensor:
        """Inputs [U, W] of the language-model head at the kept positions."""
        for linear in self._products:
            linear.make_room()
        rotation_T1F = family.rotations(self.model, position_T).unsqueeze(1)
        x_TW = _Embedded.apply(self._embedding_VW, token_T, self._dtype)  # type: ignore[no-untyped-call]
        heads = [self._heads, self._kv_heads, self._kv_heads]
        for index, layer in enumerate(self._layers):
            qkv_TAD = self._rotated(self._normed(x_TW, layer.norm_in_W, layer.qkv), layer, rotation_T1F)
            q_THD, k_TKD, v_TKD = torch.split(qkv_TAD, heads, 1)
            out_TW = layout.attend(index, q_THD, k_TKD, v_TKD, layer.scores).flatten(1)
            if layer is self._layers[-1]:  # the other rows need only keys and values
                x_TW, out_TW = x_TW.index_select(0, keep_U), out_TW.index_select(0, keep_U)
            x_TW = _linear(out_TW, layer.out, x_TW)
            gate_up = self._normed(x_TW, layer.norm_mid_W, layer.gate_up)
            x_TW = _Gated.apply(gate_up, layer.down.first, layer.down, x_TW)  # type: ignore[no-untyped-call]
        return self._normed(x_TW, self._norm_W)

    def head(self, hidden_UW: Tensor) -> Tensor:
        """Logits [U, V] before any scaling of the architecture; follows `hidden`."""
        return _linear(hidden_UW, self._head)

    def _rotated(self, qkv: Tensor, layer: family.FamilyLayer[JointLinear], rotation_T1F: Tensor) -> Tensor:
        """Queries, keys and values [T, H + 2 K, D]."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv_TAD = qkv.view(len(qkv), heads + 2 * kv_heads, self._width)
        if layer.norms_D is not None:
            q, k, v = torch.split(qkv_TAD, [heads, kv_heads, kv_heads], 1)
            qkv_TAD = torch.cat((self._normed(q, layer.norms_D[0]), self._normed(k, layer.norms_D[1]), v), 1)
        result: Tensor = _Rotated.apply(qkv_TAD, rotation_T1F, heads + kv_heads)  # type: ignore[no-untyped-call]
        return result

    def _normed(self, x: Tensor, weight_W: nn.Parameter, linear: JointLinear | None = None) -> Tensor:
        """Norm of the last axis, and its product with a joint weight if that is given."""
        first = None if linear is None else linear.first
        result: Tensor = _Normed.apply(x, weight_W, self._eps, first, linear)  # type: ignore[no-untyped-call]
        return result


class OwnForward(Protocol):
    """Forward of a model that does not call the model's own modules, such as one by hand."""

    model: PreTrainedModel

    def hidden(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_U: Tensor) -> Tensor:
        """Inputs [U, W] of the language-model head at the kept positions."""

    def head(self, hidden_UW: Tensor) -> Tensor:
        """Logits [U, V] before any scaling of the architecture; follows `hidden`."""


Forward: TypeAlias = PreTrainedModel | OwnForward
"""Forward of a model for training: the model's own modules, or another."""


def modules_of(forward: Forward) -> PreTrainedModel:
    """Model of a forward."""
    return forward if isinstance(forward, nn.Module) else forward.model


def fastest_forward(model: PreTrainedModel, dtype: torch.dtype) -> Forward:
    """Forward by hand where it is known and was measured, on a CPU."""
    return TrainingForward(model, dtype) if model.device.type == "cpu" and family.is_known(model) else model


def lay_out(forward: Forward) -> None:
    """Has a forward take up changed weights."""
    if isinstance(forward, TrainingForward):
        forward.lay_out()


def precision(forward: Forward, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context in which modules with float32 weights have products in `dtype`; a forward by hand needs none."""
    if dtype is torch.float32 or not isinstance(forward, nn.Module):
        return nullcontext()
    return torch.autocast(modules_of(forward).device.type, dtype=dtype)


def _linear(x_TI: Tensor, linear: JointLinear, residual_TO: Tensor | None = None) -> Tensor:
    """Product with a joint weight, added to the residual stream if that is given."""
    # The parameter marks the result as one with a gradient; the function adds that gradient itself.
    result: Tensor = _Linear.apply(x_TI, linear.first, linear, residual_TO)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, _: nn.Parameter, linear: JointLinear, residual_TO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.linear, ctx.adds = linear, residual_TO is not None
        if residual_TO is None:
            return F.linear(x_TI, linear.weight_OI, linear.bias_O)
        return torch.addmm(residual_TO, x_TI, linear.weight_OI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,) = ctx.saved_tensors
        ctx.linear.add_gradient(grad_TO, x_TI)
        grad_TI = grad_TO @ ctx.linear.weight_OI if ctx.needs_input_grad[0] else None
        return grad_TI, None, None, grad_TO if ctx.adds else None


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VW: nn.Parameter, token_T: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.table_VW, ctx.token_T = table_VW, token_T
        return table_VW.index_select(0, token_T).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[None, ...]:
        table_VW = ctx.table_VW
        if table_VW.grad is None:
            table_VW.grad = torch.zeros_like(table_VW)
        table_VW.grad.index_add_(0, ctx.token_T, grad_TW.to(table_VW.dtype))
        return None, None, None


class _Normed(torch.autograd.Function):
    """Root-mean-square norm over the last axis, in float32: y = x / rms(x) * weight.

    With a linear layer the result is its product of y, and the gradient computes y again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_W: nn.Parameter, eps: float, _: nn.Parameter | None, linear: JointLinear | None
    ) -> Tensor:
        unit = x.to(torch.float32, copy=True)
        scale = torch.linalg.vecdot(unit, unit).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, scale)
        ctx.weight_W, ctx.linear = weight_W, linear
        y = unit.mul_(scale).mul_(weight_W).to(x.dtype)
        return y if linear is None else F.linear(y, linear.weight_OI, linear.bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        weight_W = ctx.weight_W.detach()
        unit = x.to(torch.float32, copy=True).mul_(scale)
        if ctx.linear is not None:
            ctx.linear.add_gradient(grad, (unit * weight_W).to(x.dtype))
            grad = grad @ ctx.linear.weight_OI
        grad_unit = grad.to(torch.float32, copy=True)
        product = unit * grad_unit
        if ctx.weight_W.requires_grad:
            _add_whole([ctx.weight_W], product.flatten(0, -2).sum(0))
        along = (product @ weight_W).div_(-x.shape[-1]).unsqueeze(-1)
        return grad_unit.mul_(weight_W).addcmul_(unit, along).mul_(scale).to(x.dtype), None, None, None, None


class _Rotated(torch.autograd.Function):
    """Rotation of the first heads, those of queries and keys; the values follow them unchanged."""

    @staticmethod
    def forward(ctx: Any, qkv_TAD: Tensor, rotation_T1F: Tensor, heads: int) -> Tensor:
        ctx.rotation_T1F, ctx.heads = rotation_T1F, heads
        return _Rotated.changed(family.rotated, qkv_TAD, rotation_T1F, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TAD: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotated.changed(family.rotated_back, grad_TAD, ctx.rotation_T1F, ctx.heads), None, None

    @staticmethod
    def changed(change: Callable[[Tensor, Tensor], Tensor], x_TAD: Tensor, rotation_T1F: Tensor, heads: int) -> Tensor:
        return torch.cat((change(x_TAD[:, :heads], rotation_T1F), x_TAD[:, heads:]), 1)


class _Gated(torch.autograd.Function):
    """SwiGLU of a joint product, silu(gate) * up, times a weight, added to the residual stream.

    The gradient computes the SwiGLU again.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, _: nn.Parameter, linear: JointLinear, residual_TO: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.linear = linear
        gate, up = gate_up.chunk(2, -1)
        return torch.addmm(residual_TO, F.silu(gate).mul_(up), linear.weight_OI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        silu = F.silu(gate)
        ctx.linear.add_gradient(grad_TO, silu * up)
        grad = grad_TO @ ctx.linear.weight_OI
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
        return result, None, None, grad_TO


def _copy(parameters: Sequence[nn.Parameter], whole: Tensor) -> None:
    for parameter, part in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
        part.copy_(parameter)


def _add_whole(parameters: Sequence[nn.Parameter], grad: Tensor) -> None:
    """Adds a joint gradient to the gradients of its parameters; those that have none share its memory."""
    start = 0
    for parameter in parameters:
        part = grad[start : start + parameter.shape[0]].to(parameter.dtype)
        parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        start += parameter.shape[0]


def _without_gradient(parameters: Sequence[nn.Parameter], room: Sequence[Tensor]) -> set[int]:
    """Indices of the parameters without a gradient; they get one without numbers, in the room if there is some."""
    fresh = {index for index, parameter in enumerate(parameters) if parameter.grad is None}
    for index in fresh:
        parameters[index].grad = room[index] if room else torch.empty_like(parameters[index])
    return fresh


def _add(parameters: Sequence[nn.Parameter], grad: Tensor, start: int, fresh: Set[int]) -> None:
    """Adds rows from `start` on of a joint gradient to the gradients of its parameters, or sets the fresh ones."""
    for index, parameter in enumerate(parameters):
        first, end = max(start, 0), min(start + len(grad), len(parameter))
        if first < end:
            assert parameter.grad is not None
            part, own = grad[first - start : end - start], parameter.grad[first:end]
            _ = own.copy_(part) if index in fresh else own.add_(part)
        start -= len(parameter)
