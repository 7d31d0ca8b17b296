"""Names of the layers that low-rank adapters may change; loads no torch."""

from collections.abc import Collection, Mapping, Sequence

from shoal.errors import ConfigError

HEAD = "lm_head"


def check_targets(targets: Sequence[str], linear: Collection[str], expert: str | None) -> None:
    """Raises `ConfigError` unless each target is the name, or its end, of a linear layer whose weight is not tied.

    `linear` excludes a head that is tied to the embedding: no checkpoint could hold its adapter, because both are one
    tensor. A mixture of experts, with the name of an `expert`, needs targets: adapters do not train experts.
    """
    if not targets and expert is not None:
        raise ConfigError(
            f"train.lora.targets: expected the names of layers to adapt, such as q_proj: the model has experts "
            f"({expert}), which adapters do not train"
        )
    names = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"train.lora.targets: expected linear layers with a weight that no other layer shares "
                f"({', '.join(names)}), got {target!r}"
            )


def check_targets_of_files(targets: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `ConfigError` as `check_targets`, by the names and shapes of a checkpoint's tensors.

    Layers are numbered; a checkpoint without the head's weight has it tied to the embedding.
    """
    layers = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    experts = [name for name in shapes if ".experts." in name]
    linear = [
        name
        for name in layers
        if ".experts." not in name and (any(map(str.isdigit, name.split("."))) or name.endswith(HEAD))
    ]
    check_targets(targets, linear, next(iter(experts), None))


def adapted_shapes(targets: Sequence[str], shapes: Mapping[str, list[int]]) -> list[list[int]]:
    """Shapes of the matrices that adapters change; without `targets` every matrix but the vocabulary's."""
    layers = [(name.removesuffix(".weight").rpartition(".")[2], shape) for name, shape in shapes.items()]
    return [
        shape
        for layer, shape in layers
        if len(shape) == 2 and (layer in targets if targets else "embed" not in layer and layer != HEAD)
    ]
