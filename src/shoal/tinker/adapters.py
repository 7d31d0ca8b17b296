"""Low-rank adapters of several clients on one base model, computed in one forward pass.

W' = W + (ALPHA / rank) B A,   A [rank, in],   B [out, rank]

The tokens of a pass lie owner by owner; each owner's tokens get its own adapter. Source: LoRA (arXiv 2106.09685).
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.engine.adapters import PREFIX
from shoal.errors import RequestRefused
from shoal.tinker.messages import Adapter
from shoal.types import seed_for

ALPHA = 32
"""Scale of adapters as the Tinker documentation gives it."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")


class Adapters:
    """Adapters by owner. The base model's weights are frozen and stay as they are."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False)
        head = model.get_output_embeddings()
        self._layers = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
        }
        self._of: dict[int, dict[str, nn.Parameter]] = {}
        self._spans: list[tuple[int, int]] = []
        for name, layer in self._layers.items():
            layer.register_forward_hook(partial(self._add, name))

    def add(self, owner: int, settings: Adapter) -> dict[str, nn.Parameter]:
        """New adapter, without effect yet; its parameters by name. Raises `RequestRefused`."""
        layers = {
            name: layer
            for name, layer in self._layers.items()
            if (settings.attention if name.rpartition(".")[2] in ATTENTION else settings.mlp)
        }
        if not layers or settings.rank < 1:
            raise RequestRefused("lora_config: expected a rank of at least 1, and train_attn or train_mlp")
        generator = torch.Generator().manual_seed(seed_for("lora", settings.seed))
        parameters: dict[str, nn.Parameter] = {}
        for name, layer in layers.items():
            a = torch.empty(settings.rank, layer.in_features)
            nn.init.kaiming_uniform_(a, math.sqrt(5), generator=generator)
            b = torch.zeros(layer.out_features, settings.rank)
            for part, tensor in (("A", a), ("B", b)):
                parameters[f"{name}.lora_{part}"] = nn.Parameter(tensor.to(layer.weight.device))
        self._of[owner] = parameters
        return parameters

    def remove(self, owner: int) -> None:
        """Removes an adapter."""
        del self._of[owner]

    def served_apart(self, owner: int) -> bool:
        """Whether engines serve an adapter beside its base: one of experts apart is merged into the weights."""
        return not any(".experts." in name for name in self._of[owner])

    def files(self, owner: int) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Tensors and settings of an adapter in the form of peft."""
        tensors = {f"{PREFIX}{name}.weight": p.detach() for name, p in self._of[owner].items()}
        layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in self._of[owner]})
        rank = len(next(iter(tensors.values())))
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.model.name_or_path}
        return tensors, settings | {"r": rank, "lora_alpha": ALPHA, "target_modules": layers}

    def lay(self, owner_T: Sequence[int]) -> None:
        """Says whose the tokens of the next passes are; an owner's tokens must lie together."""
        owners = dict.fromkeys(owner_T)
        self._spans = [(owner, owner_T.count(owner)) for owner in owners]

    def merged(self, owner: int, name: str) -> Tensor | None:
        """Change that an adapter makes to a layer's weight; None for a layer that it leaves alone."""
        pair = self._pair(owner, name)
        return None if pair is None else pair[1] @ pair[0] * (ALPHA / len(pair[0]))

    def _pair(self, owner: int, name: str) -> tuple[nn.Parameter, nn.Parameter] | None:
        of = self._of[owner]
        return (of[f"{name}.lora_A"], of[f"{name}.lora_B"]) if f"{name}.lora_A" in of else None

    def _add(self, name: str, layer: nn.Module, arguments: tuple[Tensor, ...], out_1TW: Tensor) -> Tensor:
        changed, start = [], 0
        for owner, count in self._spans:
            span = slice(start, start := start + count)
            pair, y_1LW = self._pair(owner, name), out_1TW[:, span]
            if pair is not None:
                delta_1LW = F.linear(F.linear(arguments[0][:, span].float(), pair[0]), pair[1]) * (ALPHA / len(pair[0]))
                y_1LW = y_1LW + delta_1LW.to(y_1LW.dtype)
            changed.append(y_1LW)
        return changed[0] if len(changed) == 1 else torch.cat(changed, 1)
