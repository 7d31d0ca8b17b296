"""Forward pass from tokens to logits: transformers' modules, or the same products called directly.

A decode step of a small model has hundreds of operations of some microseconds each, and transformers' modules double
that time. For the Llama family `DirectForward` calls about 14 operations a layer. Linear layers with the same input
become one product, and a rotation becomes one complex product. The result is equal up to rounding (tested for each
architecture). Both use the same tensors, so weights load in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.model.loading import Layout

if TYPE_CHECKING:  # the richest of the family stands for all of it
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3Model

Forward: TypeAlias = Callable[[Tensor, Tensor, Layout, Tensor | None], Tensor]
"""Signature: (token_T, position_T, layout, keep_K) -> logits [K, V] of the kept rows; of all rows when `keep_K` is
None."""

FAMILY = frozenset(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SeedOss"))
CONSTANT_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position only."""


def forward_of(model: PreTrainedModel, longest: int) -> Forward:
    """Fastest known forward for a model whose sequences have at most `longest` tokens."""
    return DirectForward(model, longest) if _is_known(model) else through_modules(model)


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
        device = self._embedding_VW.device
        at_1L = torch.arange(longest, device=device)[None]
        cos_1LD, sin_1LD = body.rotary_emb(torch.zeros(1, device=device), at_1L)
        half = self._width // 2
        self._rotation_LF = torch.complex(cos_1LD[0, :, :half].contiguous(), sin_1LD[0, :, :half].contiguous())

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
        q, k = torch.split(_rotated(qk, rotation_T1F), [heads, kv_heads], 1)
        return q, k, v

    def _normed(self, x: Tensor, weight_W: Tensor) -> Tensor:
        return F.rms_norm(x, weight_W.shape, weight_W, self._eps)


def _rotated(x_THD: Tensor, rotation_T1F: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2), stored side by side; the order does not change dot products."""
    first, second = x_THD.float().chunk(2, -1)
    return torch.view_as_real(torch.complex(first, second).mul_(rotation_T1F)).flatten(-2).to(x_THD.dtype)


def _layer(layer: "Qwen3DecoderLayer") -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = getattr(attention, "q_norm", None) is not None
    return _Layer(
        norm_in_W=layer.input_layernorm.weight,
        norm_mid_W=layer.post_attention_layernorm.weight,
        qkv_weight=_joint([linear.weight for linear in qkv]),
        qkv_bias=None if qkv[0].bias is None else _joint([linear.bias for linear in qkv]),
        norms_D=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        out_weight_t=attention.o_proj.weight.t(),
        gate_up_weight=_joint([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down_weight_t=mlp.down_proj.weight.t(),
        scaling=attention.scaling,
        window=_window(attention),
    )


def _joint(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Fuses the parameters and makes each a view of the result, so in-place updates reach the fused tensor."""
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(joint, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joint


def _window(attention: "Qwen3Attention") -> int | None:
    """Attention window of a layer in tokens; Mistral's layers keep it in the config only."""
    of_config = type(attention).__name__ == "MistralAttention"
    window: int | None = getattr(attention.config if of_config else attention, "sliding_window", None)
    return window


def _is_known(model: PreTrainedModel) -> bool:
    """Whether the model is a family member as transformers writes it, with no module replaced or added."""
    config = model.config
    if type(model).__name__ not in FAMILY or not type(model).__module__.startswith("transformers."):
        return False
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    biased = ("o_proj", "gate_proj", "up_proj", "down_proj")
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in CONSTANT_ROTATIONS
        and all(type(linear) is nn.Linear for linear in linears)
        and not any(name.endswith(f"{part}.bias") for name, _ in model.named_parameters() for part in biased)
    )
