"""Names of weights in checkpoints.

transformers renames some weights at loading: experts are one packed tensor in the model, and a tensor for each expert
in the checkpoint. A written Version has the checkpoint's names, which every engine reads; Shoal's engine packs the
experts again.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TypeAlias, cast

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
    """Tensors of a whole model, named and split as by `save_pretrained` or by the model's own rules."""
    if (named := getattr(model, "checkpoint_tensors", None)) is not None:
        return cast("dict[str, Tensor]", named(tensors))
    return dict(revert_weight_conversion(model, dict(tensors)))


@torch.no_grad()
def model_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint in the model's form; tensors that the model lacks keep their names."""
    result: dict[str, Tensor] = {}
    for target, (converter, patterns) in conversions(model, tensors).items():
        if converter is None:
            result[target] = tensors[target]
            continue
        for name, pattern in patterns.items():
            converter.add_tensor(target, name, pattern, tensors[name])
        for name, value in converter.convert(target, model=model, config=model.config).items():
            result[name] = value[0] if isinstance(value, list) else value
    return result


Conversion: TypeAlias = tuple[WeightConverter | WeightRenaming | None, dict[str, str]]


def conversions(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Conversion]:
    """How each tensor of the model is made of tensors of a checkpoint: their names, each with its pattern.

    A tensor without a converter has the same name in the checkpoint, which the model may lack.
    """
    own = model.state_dict()
    known = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    renamings = [entry for entry in known if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in known if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if name in own or target not in own:
            found[name] = None, {}
            continue
        made = WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        found.setdefault(target, (made, {}))[1][name] = pattern or name
    return found


def with_all_parts(found: Mapping[str, Conversion]) -> dict[str, Conversion]:
    """Maps a fused tensor of a checkpoint to all its parts."""
    parts = dict(found)
    for target, (converter, sources) in found.items():
        if isinstance(converter, WeightConverter):
            first, *others = converter.target_patterns
            parts |= {target.replace(first, other): (converter, sources) for other in others}
    return parts
