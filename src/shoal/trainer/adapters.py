"""Low-rank adapters (LoRA) of several owners on one model, trained in one forward pass.

W' = W + (alpha / rank) B A,   A [rank, in],   B [out, rank]

Each layer holds the adapters that change it, and a hook adds their outputs. Engines get the adapters by themselves, or
merged into the weights. Source: LoRA (arXiv 2106.09685).
"""

import json
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.errors import TrainerError
from shoal.model.adapter_targets import check_targets
from shoal.model.mixers import mixers_of

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
SOLE = 0
"""Owner of the adapters of a model that is not shared."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers, without a head that shares the embedding's weight."""
    embedding = model.get_input_embeddings().weight
    return [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one.weight is not embedding]


def layers_named(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Linear layers whose names end with one of the targets; without targets all but the head.

    Raises `ConfigError` as `check_targets` does.
    """
    linear, head = linear_layers(model), model.get_output_embeddings()
    packed = (name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name)
    check_targets(targets, linear, next(packed, None))
    if not targets:
        return [name for name in linear if model.get_submodule(name) is not head]
    return [name for name in linear if any(f".{name}".endswith(f".{target}") for target in targets)]


def layers_of_kind(model: PreTrainedModel, *, attention: bool, mlp: bool) -> list[str]:
    """Linear layers of attention, or all others but the head. Raises `TrainerError` without any."""
    head = model.get_output_embeddings()
    layers = [
        name
        for name in linear_layers(model)
        if model.get_submodule(name) is not head and (attention if name.rpartition(".")[2] in ATTENTION else mlp)
    ]
    if not layers:
        raise TrainerError("adapter: expected attention or mlp with linear layers in the model, got none")
    return layers


class Adapters:
    """Adapters of a model by owner. The model's weights are frozen and stay as they are.

    The tokens of a pass lie owner by owner; each owner's tokens get its own adapter.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False)
        self._alphas: dict[int, float] = {}
        self._layers: dict[int, dict[str, nn.Module]] = {}
        self._hooked: set[nn.Module] = set()
        self._spans: list[tuple[int, int]] = []

    def add(self, owner: int, layers: Collection[str], *, rank: int, alpha: float, seed: int) -> None:
        """Adds an adapter of some linear layers, which has no effect yet."""
        self._alphas[owner] = alpha
        self._layers[owner] = {name: self.model.get_submodule(name) for name in layers}
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers[owner].values():
            assert isinstance(layer, nn.Linear)
            a_RI = nn.init.kaiming_uniform_(torch.empty(rank, layer.in_features), math.sqrt(5), generator=generator)
            b_OR = torch.zeros(layer.out_features, rank)
            for part, tensor in (("A", a_RI), ("B", b_OR)):
                # Weights without memory get it later; adapters have theirs at once.
                place = "cpu" if layer.weight.is_meta else layer.weight.device
                layer.register_parameter(f"lora_{part}{owner}", nn.Parameter(tensor.to(place)))
            if layer not in self._hooked:
                self._hooked.add(layer)
                layer.register_forward_hook(self._add)

    def remove(self, owner: int) -> None:
        """Removes an adapter."""
        for layer in self._layers.pop(owner).values():
            delattr(layer, f"lora_A{owner}")
            delattr(layer, f"lora_B{owner}")

    def parameters(self, owner: int) -> dict[str, nn.Parameter]:
        """Parameters of an adapter by name, sharded if the model is."""
        return {
            f"{name}.lora_{part}": layer.get_parameter(f"lora_{part}{owner}")
            for name, layer in self._layers[owner].items()
            for part in "AB"
        }

    def of_experts(self, owner: int) -> bool:
        """Whether an adapter changes experts, which no engine serves by an adapter's name."""
        return any(".experts." in name for name in self._layers[owner])

    def needs_own_pass(self, owner: int) -> bool:
        """Whether a changed layer, of experts or in a mixer, reads rows other than those of a pass."""
        return bool(mixers_of(self.model)) or self.of_experts(owner)

    def files(self, owner: int) -> tuple[dict[str, Tensor], str]:
        """Tensors by name and settings as JSON, in the form that peft and adapter-serving engines read."""
        tensors = {f"base_model.model.{name}.weight": p.detach() for name, p in self.parameters(owner).items()}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.model.config._name_or_path,
            "r": len(next(iter(tensors.values()))),
            "lora_alpha": self._alphas[owner],
            "lora_dropout": 0.0,
            "target_modules": sorted({name.rpartition(".")[2] for name in self._layers[owner]}),
            "bias": "none",
        }
        return tensors, json.dumps(settings, indent=1) + "\n"

    def lay(self, owner_T: Sequence[int]) -> None:
        """Names the owners of the next passes' tokens, each owner's together; before that all tokens are `SOLE`'s."""
        self._spans = [(owner, owner_T.count(owner)) for owner in dict.fromkeys(owner_T)]

    def change(self, owner: int, name: str) -> Tensor | None:
        """Change of a layer's weight by an adapter; None for a layer that it leaves alone."""
        layer = self._layers[owner].get(name)
        if layer is None:
            return None
        a_RI, b_OR = (layer.get_parameter(f"lora_{part}{owner}") for part in "AB")
        return b_OR @ a_RI * (self._alphas[owner] / len(a_RI))

    def _add(self, layer: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> Tensor:
        x, spans = arguments[0], self._spans or [(SOLE, 0)]
        if len(spans) == 1:
            return self._adapted(layer, spans[0][0], x, y)
        tokens = sum(count for _, count in spans)
        assert x.shape[-2] == tokens == x.shape[:-1].numel(), (
            "this layer reads other rows: its owners need passes apart"
        )
        parts, start = [], 0
        for owner, count in spans:
            span = slice(start, start := start + count)
            parts.append(self._adapted(layer, owner, x[..., span, :], y[..., span, :]))
        return torch.cat(parts, -2)

    def _adapted(self, layer: nn.Module, owner: int, x: Tensor, y: Tensor) -> Tensor:
        """Output of a layer for the tokens of an owner."""
        a_RI, b_OR = (getattr(layer, f"lora_{part}{owner}", None) for part in "AB")
        if a_RI is None or b_OR is None:
            return y
        change = F.linear(F.linear(x.to(a_RI.dtype), a_RI), b_OR) * (self._alphas[owner] / len(a_RI))
        return y + change.to(y.dtype)


@torch.no_grad()
def merged_tensors(model: nn.Module, adapters: Adapters | None = None, owner: int = SOLE) -> dict[str, Tensor]:
    """Weights of the whole model, tied ones once, with an owner's adapter merged into them."""
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        change = None if adapters is None else adapters.change(owner, name.removesuffix(".weight"))
        result[name] = tensor.detach() if change is None else tensor + change
    return result
