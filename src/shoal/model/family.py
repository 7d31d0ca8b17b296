"""Llama family: the architectures whose layers Shoal computes itself, without transformers' modules.

Type annotations name Qwen3, which has every feature of the family.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.model.attention import Scores

if TYPE_CHECKING:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model

FAMILY = frozenset(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SeedOss"))
CONSTANT_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position only."""


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
