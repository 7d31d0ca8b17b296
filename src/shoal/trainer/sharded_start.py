"""Start of a sharded model: each rank makes it without memory, shards it, and reads its slices only.

Slices of a float32 checkpoint on a CPU are views of the mapped file: they take memory when they are first used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming

from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError, ModelError
from shoal.model import checkpoint_names
from shoal.model.loading import Checkpointing, checkpoint_layers, empty_model, load_model, refuse_different
from shoal.model.tensor_files import FILE, INDEX, TensorFiles
from shoal.trainer.adapters import SOLE, Adapters, layers_named
from shoal.trainer.heap import give_back
from shoal.trainer.ranks import Ranks, own_rows, rows_here
from shoal.types import seed_for

PROBED_TOKENS = 16


def trained_model(
    path: Path | str, model: ModelConfig, train: TrainConfig, ranks: Ranks, device: str
) -> tuple[PreTrainedModel, Adapters | None]:
    """Model sharded over the ranks, from the configured backend, with its adapters, if any.

    All ranks call it. Raises `ModelError` and `ConfigError`.
    """
    if train.experts == "torchtitan":
        if train.lora.rank or train.router_replay or model.gradient_checkpointing:
            raise ConfigError(
                "train.experts: expected torchtitan without train.lora, train.router_replay or "
                "model.gradient_checkpointing"
            )
        from shoal.trainer.torchtitan import TitanModel

        return cast("PreTrainedModel", TitanModel(path, ranks, device)), None
    if not train.lora.rank:
        return loaded(path, ranks, device, gradient_checkpointing=model.gradient_checkpointing), None
    adapters = Adapters(load_model(path, device=device, gradient_checkpointing=model.gradient_checkpointing))
    layers = layers_named(adapters.model, train.lora.targets)
    if ranks.count > 1 and adapters.model.get_output_embeddings() in map(adapters.model.get_submodule, layers):
        # It is called after the sharded forward, whose hooks would collect its gradient.
        raise ConfigError("train.lora.targets: expected no head with several train.ranks, which do not train it")
    adapters.add(SOLE, layers, rank=train.lora.rank, alpha=train.lora.alpha, seed=seed_for("lora"))
    ranks.shard(adapters.model, device)
    return adapters.model, adapters


def loaded(
    path: Path | str, ranks: Ranks, device: str, *, gradient_checkpointing: Checkpointing = False
) -> PreTrainedModel:
    """Model at `path`, sharded over the ranks; each rank reads its part only.

    All ranks call it. Raises `ModelError` and `ConfigError`.
    """
    if ranks.count > 1 and _has_slices(Path(path)):
        return load_sharded(Path(path), ranks, device, gradient_checkpointing=gradient_checkpointing)
    model = load_model(path, device=device, gradient_checkpointing=gradient_checkpointing)
    ranks.shard(model, device)
    return model


def load_sharded(
    path: Path, ranks: Ranks, device: str, *, gradient_checkpointing: Checkpointing = False
) -> PreTrainedModel:
    """Causal LM in float32, sharded over the ranks, in evaluation mode; all ranks call it. Raises `ModelError`.

    Attention is checked on a copy with a vocabulary of few tokens, because the whole one would be gathered here. Each
    parameter had memory while it was made; of a model of 281M parameters, 100 MB of it fit none of the others.
    """
    files = TensorFiles(path)
    probed = empty_model(path, few_tokens=PROBED_TOKENS)
    give_back()
    ranks.shard(probed.to(device) if device != "cpu" else probed, device)
    fill(probed, files, device)
    refuse_different(probed)
    del probed
    model = empty_model(path)
    give_back()
    checkpoint_layers(model, gradient_checkpointing)
    ranks.shard(model, device)
    fill(model, files, device)
    return model


def _has_slices(path: Path) -> bool:
    """Whether a model is a directory of safetensors files."""
    return any((path / name).is_file() for name in (FILE, INDEX))


@torch.no_grad()
def fill(model: PreTrainedModel, files: TensorFiles, device: str) -> None:
    """Gives each parameter without memory its part of the checkpoint. Raises `ModelError` for one that it lacks."""
    made_of = checkpoint_names.with_all_parts(checkpoint_names.conversions(model, files))
    filled: dict[int, nn.Parameter] = {}  # tied parameters stay one
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    empty = [
        (module, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    if missing := sorted({names[id(parameter)] for *_, parameter in empty} - made_of.keys()):
        raise ModelError(
            f"model {model.config._name_or_path!r} lacks {len(missing)} of its tensors, such as {missing[0]}"
        )
    for module, key, parameter in empty:
        if id(parameter) not in filled:
            filled[id(parameter)] = _filled(model, names[id(parameter)], parameter, files, made_of, device)
        setattr(module, key, filled[id(parameter)])
    for name, buffer in model.named_buffers():
        if name in made_of:
            buffer.copy_(_whole(model, name, files, made_of))


def _filled(
    model: PreTrainedModel,
    name: str,
    parameter: nn.Parameter,
    files: TensorFiles,
    made_of: Mapping[str, tuple[object, dict[str, str]]],
    device: str,
) -> nn.Parameter:
    """Parameter with this rank's rows."""
    converter, sources = made_of[name]
    if not isinstance(parameter.data, DTensor):
        return nn.Parameter(_whole(model, name, files, made_of).float().to(device), parameter.requires_grad)
    if len(sources) > 1 or (converter is not None and not isinstance(converter, WeightRenaming)):
        whole, where = _whole(model, name, files, made_of).float().to(device), parameter.data
        split = distribute_tensor(whole, where.device_mesh, where.placements, src_data_rank=None)
        return nn.Parameter(split, parameter.requires_grad)
    source = next(iter(sources), name)
    rows = files.rows(source, rows_here(parameter.data)).float().to(device)
    return nn.Parameter(own_rows(rows, parameter.data), parameter.requires_grad)


def _whole(
    model: PreTrainedModel, name: str, files: TensorFiles, made_of: Mapping[str, tuple[object, dict[str, str]]]
) -> Tensor:
    sources = made_of[name][1] or {name: name}
    tensors = {source: files.whole(source) for source in sources}
    return checkpoint_names.model_tensors(model, tensors)[name]
