"""What decoding costs at the least: a static-cache greedy loop written by hand for one batch of equal prompts.

No scheduler, no requests, no logprobs, no sampling: weights of like inputs are fused, the cache has exactly the room
that is needed, and all rows begin and end together. An engine that comes near it wastes little.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in_W: Tensor
    norm_mid_W: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor


class StaticLoop:
    """Greedy decoding of a Qwen2 model whose key-value heads are as many as its query heads."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        config = model.config
        assert config.num_key_value_heads == config.num_attention_heads
        self._heads = config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._embedding_VW = model.get_input_embeddings().weight.detach()
        self._norm_W = model.model.norm.weight.detach()
        self._head_VW = model.lm_head.weight.detach()
        self._layers = [_fused(layer) for layer in model.model.layers]
        width = self._embedding_VW.shape[1] // self._heads
        frequency_D = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angle_LD = torch.arange(config.max_position_embeddings)[:, None] * frequency_D.repeat(2)
        self._cos_LD, self._sin_LD = angle_LD.cos(), angle_LD.sin()

    @torch.inference_mode()
    def tokens(self, prompt_BL: Tensor, count: int) -> Tensor:
        """The next `count` tokens of each row: [B, count]."""
        batch, length = prompt_BL.shape
        width = self._embedding_VW.shape[1] // self._heads
        shape = (2, len(self._layers), batch, self._heads, length + count, width)
        cache = torch.empty(shape, dtype=self._embedding_VW.dtype)
        drawn = [self._next(prompt_BL, 0, cache)]
        for position in range(length, length + count - 1):
            drawn.append(self._next(drawn[-1][:, None], position, cache))
        return torch.stack(drawn, 1)

    def _next(self, token_BL: Tensor, start: int, cache: Tensor) -> Tensor:
        batch, length = token_BL.shape
        end = start + length
        cos_LD, sin_LD = self._cos_LD[start:end], self._sin_LD[start:end]
        x = self._embedding_VW[token_BL]
        for i, layer in enumerate(self._layers):
            qkv = F.linear(self._normed(x, layer.norm_in_W), layer.qkv_weight, layer.qkv_bias)
            q, k, v = qkv.view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            cache[0, i, :, :, start:end] = _rotated(k, cos_LD, sin_LD)
            cache[1, i, :, :, start:end] = v
            out = F.scaled_dot_product_attention(
                _rotated(q, cos_LD, sin_LD), cache[0, i, :, :, :end], cache[1, i, :, :, :end], is_causal=length > 1
            )
            x = x + F.linear(out.transpose(1, 2).flatten(2), layer.out_weight)
            gate, up = F.linear(self._normed(x, layer.norm_mid_W), layer.gate_up_weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down_weight)
        return F.linear(self._normed(x[:, -1], self._norm_W), self._head_VW).argmax(-1)

    def _normed(self, x: Tensor, weight_W: Tensor) -> Tensor:
        return F.rms_norm(x, weight_W.shape, weight_W, self._eps)


def _fused(layer: Qwen2DecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        layer.input_layernorm.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        torch.cat([part.weight.detach() for part in parts]),
        torch.cat([part.bias.detach() for part in parts]),
        attention.o_proj.weight.detach(),
        torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        mlp.down_proj.weight.detach(),
    )


def _rotated(x: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos_LD + torch.cat((-second, first), -1) * sin_LD
