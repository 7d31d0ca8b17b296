"""Llama family: the architectures whose layers Shoal computes itself, without transformers' modules.

Type annotations name Qwen3, which has every feature of the family.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.model.attention import Scores

if TYPE_CHECKING:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3Model

FAMILY = frozenset(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SeedOss"))
CONSTANT_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position only."""
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class FamilyLayer(Generic[P]):
    """Weights of one layer; a product `P` computes linear layers with the same input."""

    norm_in_W: nn.Parameter
    norm_mid_W: nn.Parameter
    norms_D: tuple[nn.Parameter, nn.Parameter] | None
    """Norm weights of queries and keys, where the architecture has them."""
    qkv: P
    out: P
    gate_up: P
    down: P
    scores: Scores


class FamilyForward(Generic[P]):
    """Weights and sizes of a model of the family, for a forward without transformers' modules."""

    def __init__(self, model: PreTrainedModel, product: Callable[[Sequence[nn.Linear]], P]) -> None:
        config, body = model.config, cast("Qwen3Model", model.model)
        self.model = model
        self._layers = [_layer(cast("Qwen3DecoderLayer", layer), product) for layer in body.layers]
        self._embedding_VW = cast("nn.Parameter", model.get_input_embeddings().weight)
        self._norm_W = body.norm.weight
        self._eps: float = config.rms_norm_eps
        self._width: int = body.layers[0].self_attn.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._products = [one for layer in self._layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]


def _layer(layer: "Qwen3DecoderLayer", product: Callable[[Sequence[nn.Linear]], P]) -> FamilyLayer[P]:
    attention, mlp = layer.self_attn, layer.mlp
    normed = getattr(attention, "q_norm", None) is not None
    return FamilyLayer(
        norm_in_W=layer.input_layernorm.weight,
        norm_mid_W=layer.post_attention_layernorm.weight,
        norms_D=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        qkv=product([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=product([attention.o_proj]),
        gate_up=product([mlp.gate_proj, mlp.up_proj]),
        down=product([mlp.down_proj]),
        scores=scores_of(attention),
    )


def is_known(model: PreTrainedModel) -> bool:
    """Whether the model is a family member as transformers writes it, with no module replaced or added."""
    config = model.config
    if type(model).__name__ not in FAMILY or not type(model).__module__.startswith("transformers."):
        return False
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    linears.append(model.get_output_embeddings())
    biased = ("o_proj", "gate_proj", "up_proj", "down_proj")
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in CONSTANT_ROTATIONS
        and all(type(linear) is nn.Linear for linear in linears)
        and not any(name.endswith(f"{part}.bias") for name, _ in model.named_parameters() for part in biased)
    )


def scores_of(attention: "Qwen3Attention") -> Scores:
    """Rule of a layer's attention; Mistral's layers keep their window in the config only."""
    of_config = type(attention).__name__ == "MistralAttention"
    return Scores(attention.scaling, getattr(attention.config if of_config else attention, "sliding_window", None))


def joint(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Fuses the parameters and makes each a view of the result, so in-place updates reach the fused tensor."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def rotations(model: PreTrainedModel, position_T: Tensor) -> Tensor:
    """Rotations [T, F] of the rotary embedding at some positions, as complex numbers."""
    body = cast("Qwen3Model", model.model)
    cos_1TD, sin_1TD = body.rotary_emb(torch.zeros(1, device=position_T.device), position_T[None])
    half = cos_1TD.shape[-1] // 2
    return torch.complex(cos_1TD[0, :, :half].contiguous(), sin_1TD[0, :, :half].contiguous())


def rotated(x_THD: Tensor, rotation_T1F: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2), stored side by side; the order does not change dot products."""
    first, second = x_THD.float().chunk(2, -1)
    return torch.view_as_real(torch.complex(first, second).mul_(rotation_T1F)).flatten(-2).to(x_THD.dtype)


def rotated_back(grad_THD: Tensor, rotation_T1F: Tensor) -> Tensor:
    """Gradient of the argument of `rotated`."""
    pairs_THF = torch.view_as_complex(grad_THD.float().view(*grad_THD.shape[:-1], -1, 2)) * rotation_T1F.conj()
    return torch.cat((pairs_THF.real, pairs_THF.imag), -1).to(grad_THD.dtype)
