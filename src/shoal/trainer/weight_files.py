"""Weights of the trained model by name, and low-rank adapters (peft) trained in place of the weights.

W' = W + (alpha / rank) B A,   A [rank, in],   B [out, rank]

Engines get merged weights, so sampling costs nothing extra and every engine can serve them. Source: LoRA (arXiv
2106.09685).
"""

import json

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config.training import LoRAConfig
from shoal.errors import ConfigError
from shoal.model.adapter_targets import check_targets
from shoal.types import seed_for

ADAPTER = "default"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def add_adapters(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Adds adapters to the model's linear layers and freezes everything else.

    Adapters start with zero effect and a fixed seed, so a run replayed from its beginning arrives at the same weights.
    Raises `ConfigError` without peft, and for targets that `check_targets` refuses.
    """
    embedding = model.get_input_embeddings().weight
    linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one.weight is not embedding]
    packed = (name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name)
    check_targets(config.targets, linear, next(packed, None))
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            "train.lora: expected the package peft, which is not installed; pip install 'shoal[lora]' brings it"
        ) from error
    targets = list(config.targets) or "all-linear"
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for("lora"))
        try:
            inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ConfigError(f"train.lora.targets: {str(error).splitlines()[0]}") from error


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors A and B of every adapted layer."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if ".lora_" in name}


@torch.no_grad()
def merged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the whole model, tied ones once; adapters are merged, under the names without adapters."""
    adapted = {
        f"{name}.weight": module.get_delta_weight
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        plain = name.replace(".base_layer.", ".")
        result[plain] = tensor + adapted[plain](ADAPTER) if plain in adapted else tensor.detach()
    return result


def adapter_files(model: PreTrainedModel, config: LoRAConfig) -> tuple[dict[str, Tensor], str]:
    """Adapter files in the form that peft and adapter-serving engines read: tensors by name, and settings as JSON."""
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor
        for name, tensor in adapter_tensors(model).items()
    }
    layers = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config._name_or_path,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers,
        "bias": "none",
    }
    return tensors, json.dumps(settings, indent=1) + "\n"
