"""Start of a sharded model: each rank makes it without memory, shards it, and reads its slices only.

Slices of a float32 checkpoint on a CPU are views of the mapped file: they take memory when they are first used.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming

from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError, ModelError
from shoal.model import checkpoint_names
from shoal.model.loading import DTYPES, Checkpointing, checkpoint_layers, empty_model, load_model, refuse_different
from shoal.model.tensor_files import FILE, INDEX, TensorFiles, Tensors
from shoal.trainer.adapters import SOLE, Adapters, layers_named
from shoal.trainer.heap import give_back
from shoal.trainer.ranks import Ranks, own_rows, rows_here
from shoal.types import seed_for

PROBED_TOKENS = 16
EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Number of an expert in the name of its tensor in a checkpoint."""


def trained_model(
    path: Path | str, model: ModelConfig, train: TrainConfig, ranks: Ranks, device: str, files: Tensors | None = None
) -> tuple[PreTrainedModel, Adapters | None]:
    """Model sharded over the ranks, from the configured backend, with its adapters, if any.

    Weights below adapters have the dtype of the products, because they never change. All ranks call it. Raises
    `ModelError` and `ConfigError`.
    """
    dtype, checkpointing = DTYPES[model.dtype], model.gradient_checkpointing
    if not train.lora.rank:
        return loaded(path, ranks, device, dtype, gradient_checkpointing=checkpointing, files=files), None
    kept: list[Adapters] = []

    def adapted(base: PreTrainedModel) -> None:
        adapters = Adapters(base)
        layers = layers_named(base, train.lora.targets)
        if ranks.count > 1 and base.get_output_embeddings() in map(base.get_submodule, layers):
            # It is called after the sharded forward, whose hooks would collect its gradient.
            raise ConfigError("train.lora.targets: expected no head with several train.ranks, which do not train it")
        adapters.add(SOLE, layers, rank=train.lora.rank, alpha=train.lora.alpha, seed=seed_for("lora"))
        kept.append(adapters)

    started = loaded(
        path, ranks, device, dtype, frozen=True, gradient_checkpointing=checkpointing, files=files, change=adapted
    )
    return started, kept[0]


def loaded(
    path: Path | str,
    ranks: Ranks,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    frozen: bool = False,
    gradient_checkpointing: Checkpointing = False,
    files: Tensors | None = None,
    change: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Model at `path`, sharded over the ranks with products in the `dtype`; each rank reads its part only.

    Weights are float32, or of the `dtype` too if the model is sharded and they stay `frozen`. `change` is called with
    the model before it is sharded, and `files` replace the model's own. All ranks call it. Raises `ModelError` and
    `ConfigError`.

    Attention is checked on a copy with a vocabulary of few tokens, because the whole one would be gathered here. Each
    parameter had memory while it was made; of a model of 281M parameters, 100 MB of it fit none of the others.
    """
    if files is None and (ranks.count == 1 or not _has_slices(Path(path))):
        model = load_model(path, device=device, gradient_checkpointing=gradient_checkpointing)
        if change is not None:
            change(model)
        ranks.shard(model, device, dtype)
        return model
    if files is None:
        files = TensorFiles(Path(path))
        probed = empty_model(path, few_tokens=PROBED_TOKENS)
        give_back()
        move(probed, device)
        ranks.shard(probed, device)
        fill(probed, files, device)
        refuse_different(probed)
        del probed
    model = empty_model(path, dtype if frozen else torch.float32)
    give_back()
    checkpoint_layers(model, gradient_checkpointing)
    if change is not None:
        change(model)
    move(model, device)
    ranks.shard(model, device, dtype)
    fill(model, files, device)
    return model


def move(model: PreTrainedModel, device: str) -> None:
    """Moves what has memory already, such as buffers and adapters."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type not in ("meta", torch.device(device).type):
                module._parameters[name] = nn.Parameter(parameter.to(device), parameter.requires_grad)
        module._buffers.update({name: one.to(device) for name, one in module._buffers.items() if one is not None})


def _has_slices(path: Path) -> bool:
    """Whether a model is a directory of safetensors files."""
    return any((path / name).is_file() for name in (FILE, INDEX))


@torch.no_grad()
def fill(model: PreTrainedModel, files: Tensors, device: str) -> None:
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
            name = names[id(parameter)]
            numbers = _numbers(model, name, parameter.data, files, made_of[name], device)
            filled[id(parameter)] = nn.Parameter(numbers, parameter.requires_grad)
        setattr(module, key, filled[id(parameter)])
    for name, buffer in model.named_buffers():
        if name in made_of:
            buffer.copy_(_made(model, name, files, made_of[name][1]))


def _numbers(
    model: PreTrainedModel,
    name: str,
    where: Tensor,
    files: Tensors,
    made_of: tuple[object, dict[str, str]],
    device: str,
) -> Tensor:
    """Numbers of a parameter, or this rank's rows of them, in its place and dtype."""
    converter, sources = made_of
    if not isinstance(where, DTensor):
        return _made(model, name, files, sources).to(device, where.dtype)
    if len(sources) > 1 or (converter is not None and not isinstance(converter, WeightRenaming)):
        experts = {source: int(found[1]) for source in sources if (found := EXPERT.search(source))}
        if len(experts) == len(sources):  # its rows are experts, and only this rank's are read
            own = rows_here(where)
            chosen = {source: sources[source] for source, n in experts.items() if own.start <= n < own.stop}
            rows = _made(model, name, files, chosen) if chosen else torch.empty(0, *where.shape[1:])
            return own_rows(rows.to(device, where.dtype), where)
        whole = _made(model, name, files, sources).to(device, where.dtype)
        return distribute_tensor(whole, where.device_mesh, where.placements, src_data_rank=None)
    source = next(iter(sources), name)
    return own_rows(files.rows(source, rows_here(where)).to(device, where.dtype), where)


def _made(model: PreTrainedModel, name: str, files: Tensors, sources: Iterable[str]) -> Tensor:
    tensors = {source: files.whole(source) for source in sources or (name,)}
    return checkpoint_names.model_tensors(model, tensors)[name]
