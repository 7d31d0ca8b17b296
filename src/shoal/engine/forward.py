"""Forward pass from tokens to logits: transformers' modules, or the same products called directly.

A decode step of a small model has hundreds of operations of some microseconds each, and transformers' modules double
that time. For the Llama family `DirectForward` calls about 14 operations a layer. Linear layers with the same input
become one product, and a rotation becomes one complex product. The result is equal up to rounding (tested for each
architecture). Both use the same tensors, so weights load in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.model import family
from shoal.model.family import Layout

if TYPE_CHECKING:  # the richest of the family stands for all of it
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model

Forward: TypeAlias = Callable[[Tensor, Tensor, Layout, Tensor | None], Tensor]
"""Signature: (token_T, position_T, layout, keep_K) -> logits [K, V] of the kept rows; of all rows when `keep_K` is
None."""


def forward_of(model: PreTrainedModel, longest: int) -> Forward:
    """Fastest known forward for a model whose sequences have at most `longest` tokens."""
    return DirectForward(model, longest) if family.is_known(model) else through_modules(model)


def through_modules(model: PreTrainedModel) -> Forward:
    """Forward of any causal LM through transformers' modules."""

    def forward(token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        logits_1KV: Tensor = model(
            input_ids=token_T[None],
            position_ids=position_T[None],
            use_cache=False,
            logits_to_keep=0 if keep_K is None else keep_K,
            layout=layout,
        ).logits
        return logits_1KV[0]

    return forward


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in_W: Tensor
    norm_mid_W: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    norms_D: tuple[Tensor, Tensor] | None
    """Norm weights of queries and keys, where the architecture has them."""
    out_weight_t: Tensor
    gate_up_weight: Tensor
    down_weight_t: Tensor
    scaling: float
    window: int | None


class DirectForward:
    """Forward of a Llama-family model.

    It interleaves the halves of stored key vectors, so no other forward can read them.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        config, body = model.config, cast("Qwen3Model", model.model)
        self._embedding_VW = model.get_input_embeddings().weight
        self._head_VW = model.get_output_embeddings().weight
        self._norm_W = body.norm.weight
        self._eps: float = config.rms_norm_eps
        self._layers = [_layer(cast("Qwen3DecoderLayer", layer)) for layer in body.layers]
        self._width: int = body.layers[0].self_attn.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._rotation_LF = family.rotations(model, torch.arange(longest, device=self._embedding_VW.device))

    def __call__(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        """Computes logits; see `Forward`."""
        rotation_T1F = self._rotation_LF.index_select(0, position_T).unsqueeze(1)
        x_TW = self._embedding_VW.index_select(0, token_T)
        for index, layer in enumerate(self._layers):
            q, k, v = self._attended(self._normed(x_TW, layer.norm_in_W), layer, rotation_T1F)
            out_TW = layout.attend(index, q, k, v, layer.scaling, layer.window).flatten(1)
            if keep_K is not None and layer is self._layers[-1]:  # the other rows need only keys and values
                x_TW, out_TW = x_TW.index_select(0, keep_K), out_TW.index_select(0, keep_K)
            x_TW = torch.addmm(x_TW, out_TW, layer.out_weight_t)
            gate_up = F.linear(self._normed(x_TW, layer.norm_mid_W), layer.gate_up_weight)
            gate, up = gate_up.chunk(2, -1)
            x_TW = torch.addmm(x_TW, F.silu(gate).mul_(up), layer.down_weight_t)
        return F.linear(self._normed(x_TW, self._norm_W), self._head_VW)

    def _attended(self, x_TW: Tensor, layer: _Layer, rotation_T1F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D] and keys and values [T, K, D]."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = F.linear(x_TW, layer.qkv_weight, layer.qkv_bias).view(len(x_TW), heads + 2 * kv_heads, self._width)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], 1)
        if layer.norms_D is not None:
            q, k = torch.split(qk, [heads, kv_heads], 1)
            qk = torch.cat((self._normed(q, layer.norms_D[0]), self._normed(k, layer.norms_D[1])), 1)
        q, k = torch.split(family.rotated(qk, rotation_T1F), [heads, kv_heads], 1)
        return q, k, v

    def _normed(self, x: Tensor, weight_W: Tensor) -> Tensor:
        return F.rms_norm(x, weight_W.shape, weight_W, self._eps)


def _layer(layer: "Qwen3DecoderLayer") -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = getattr(attention, "q_norm", None) is not None
    return _Layer(
        norm_in_W=layer.input_layernorm.weight,
        norm_mid_W=layer.post_attention_layernorm.weight,
        qkv_weight=family.joint([linear.weight for linear in qkv]),
        qkv_bias=None if qkv[0].bias is None else family.joint([linear.bias for linear in qkv]),
        norms_D=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        out_weight_t=attention.o_proj.weight.t(),
        gate_up_weight=family.joint([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down_weight_t=mlp.down_proj.weight.t(),
        scaling=attention.scaling,
        window=family.window_of(attention),
    )
