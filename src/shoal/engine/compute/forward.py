"""Forward pass from tokens to logits: transformers' modules, or the same products called directly.

A decode step of a small model has hundreds of operations of some microseconds each, and transformers' modules double
that time. For the Llama family `DirectForward` calls about 14 operations a layer. Linear layers with the same input
become one product, and a rotation becomes one complex product. The result is equal up to rounding (tested for each
architecture). Both use the same tensors, so weights load in place; `lay_out` follows.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.engine.compute.adapters import AdaptedRows, Products
from shoal.model import family
from shoal.model.mixers import Layout, mixers_of
from shoal.model.product import Product


class Forward(Protocol):
    """Forward pass of a model."""

    adapted: AdaptedRows | None
    """Rows of the next forward that adapters change."""

    @property
    def products(self) -> Products:
        """Products that adapters may change."""

    def __call__(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        """Logits [K, V] of the kept rows; of all rows when `keep_K` is None."""

    def lay_out(self) -> None:
        """Repacks the weights after an update."""


def forward_of(model: PreTrainedModel, longest: int) -> Forward:
    """Fastest forward for a model and sequences of at most `longest` tokens."""
    return DirectForward(model, longest) if family.is_known(model) else ModuleForward(model)


class ModuleForward:
    """Forward of any causal LM through transformers' modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        self._model = model
        # A list of experts, and a mixer, read rows other than the forward's.
        others = (".experts.", *(f"{name}." for name in mixers_of(model)))
        self._linears = {
            name: one
            for name, one in model.named_modules()
            if isinstance(one, nn.Linear) and one is not head and not any(other in f"{name}." for other in others)
        }
        self.products: Products = {name: ((name, one.out_features),) for name, one in self._linears.items()}
        self.adapted: AdaptedRows | None = None

    def __call__(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        """Computes logits; see `Forward`."""
        with ExitStack() as hooks:
            if self.adapted is not None:
                for name, linear in self._linears.items():
                    hooks.callback(linear.register_forward_hook(partial(self._add, self.adapted, name)).remove)
            logits_1KV: Tensor = self._model(
                input_ids=token_T[None],
                position_ids=position_T[None],
                use_cache=False,
                logits_to_keep=0 if keep_K is None else keep_K,
                layout=layout,
            ).logits
        return logits_1KV[0]

    def lay_out(self) -> None:
        """Does nothing: the modules use the weights themselves."""

    @staticmethod
    def _add(adapted: AdaptedRows, name: str, _: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> Tensor:
        x, y = given[0].reshape(-1, given[0].shape[-1]), result.reshape(-1, result.shape[-1])
        return adapted.added(name, x, y).view(result.shape)


class DirectForward(family.FamilyForward[Product]):
    """Forward of a Llama-family model.

    It interleaves the halves of stored key vectors, so no other forward can read them.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self.adapted: AdaptedRows | None = None
        self.products: dict[str, Sequence[tuple[str, int]]] = {}
        names = {id(module): name for name, module in model.named_modules()}

        def product(linears: Sequence[nn.Linear]) -> Product:
            name = names[id(linears[0])]
            self.products[name] = [(names[id(linear)], linear.out_features) for linear in linears]
            return _product(linears, name)

        super().__init__(model, product)
        self._head = _product([model.get_output_embeddings()])
        self._rotation_LF = family.rotations(model, torch.arange(longest, device=self._embedding_VW.device))

    def __call__(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        """Computes logits; see `Forward`."""
        rotation_T1F = self._rotation_LF.index_select(0, position_T).unsqueeze(1)
        x_TW = self._embedding_VW.index_select(0, token_T)
        for index, layer in enumerate(self._layers):
            q, k, v = self._attended(self._normed(x_TW, layer.norm_in_W), layer, rotation_T1F)
            out_TW = layout.attend(index, q, k, v, layer.scores).flatten(1)
            kept = keep_K is not None and layer is self._layers[-1]
            if keep_K is not None and kept:  # the other rows need only keys and values
                x_TW, out_TW = x_TW.index_select(0, keep_K), out_TW.index_select(0, keep_K)
            x_TW = self._adapted(layer.out, out_TW, layer.out(out_TW, x_TW), kept=kept)
            mid_TW = self._normed(x_TW, layer.norm_mid_W)
            gate_up = self._adapted(layer.gate_up, mid_TW, layer.gate_up(mid_TW), kept=kept)
            gate, up = gate_up.chunk(2, -1)
            mid_TW = F.silu(gate).mul_(up)
            x_TW = self._adapted(layer.down, mid_TW, layer.down(mid_TW, x_TW), kept=kept)
        return self._head(self._normed(x_TW, self._norm_W))

    def lay_out(self) -> None:
        """Repacks the weights after an update."""
        for product in (*self._products, self._head):
            product.lay_out()

    def _attended(
        self, x_TW: Tensor, layer: family.FamilyLayer[Product], rotation_T1F: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D] and keys and values [T, K, D]."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._adapted(layer.qkv, x_TW, layer.qkv(x_TW))
        qkv = qkv.view(len(x_TW), heads + 2 * kv_heads, self._width)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], 1)
        if layer.norms_D is not None:
            q, k = torch.split(qk, [heads, kv_heads], 1)
            qk = torch.cat((self._normed(q, layer.norms_D[0]), self._normed(k, layer.norms_D[1])), 1)
        q, k = torch.split(family.rotated(qk, rotation_T1F), [heads, kv_heads], 1)
        return q, k, v

    def _adapted(self, product: Product, x_TW: Tensor, y_TO: Tensor, *, kept: bool = False) -> Tensor:
        return y_TO if self.adapted is None else self.adapted.added(product.name, x_TW, y_TO, kept=kept)

    def _normed(self, x: Tensor, weight_W: Tensor) -> Tensor:
        return F.rms_norm(x, weight_W.shape, weight_W, self._eps)


def _product(linears: Sequence[nn.Linear], name: str = "") -> Product:
    """Linear layers with the same input as one product; their parameters become views of its weight."""
    if len(linears) == 1:
        return Product(linears[0].weight, linears[0].bias, name)
    weight_OI = family.joint([cast("nn.Parameter", linear.weight) for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Product(weight_OI, family.joint(biases) if biases else None, name)
