"""Names of weights in checkpoints.

transformers renames some weights at loading: experts are one packed tensor in the model, and a tensor for each expert
in the checkpoint. A written Version has the checkpoint's names, which every engine reads; Shoal's engine packs the
experts again.
"""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


@torch.no_grad()
def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a whole model as `save_pretrained` names and splits them."""
    return dict(revert_weight_conversion(model, dict(tensors)))


@torch.no_grad()
def model_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint in the model's form; tensors that the model lacks keep their names."""
    own = model.state_dict()
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, WeightConverter | WeightRenaming] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: dot_natural_key(item[0])):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if name in own or target not in own:
            result[name] = tensor
            continue
        made = WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        collected.setdefault(target, made).add_tensor(target, name, pattern or name, tensor)
    for target, converter in collected.items():
        for name, value in converter.convert(target, model=model, config=model.config).items():
            result[name] = value[0] if isinstance(value, list) else value
    return result
