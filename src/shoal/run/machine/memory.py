"""Memory that the processes of a run keep for as long as they live: a lower bound, from model files and settings."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import psutil

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.model.adapter_targets import adapted_shapes
from shoal.model.file_sizes import shapes_of, sizes_of
from shoal.run.machine.mesh import STATE_BYTES, Mesh, mesh_of

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


def trainer_mesh(config: Config, shapes: Mapping[str, list[int]], gpu_bytes: int, ranks: int | None = None) -> Mesh:
    """Mesh of the run's ranks, each with a GPU of that memory, or 0 on CPUs, for a model of these shapes.

    `ranks` have joined, if they are fewer than the configured ones.
    """
    numbers, lora, places = sum(map(prod, shapes.values())), config.train.lora, config.cluster.trainer
    adapters = sum(lora.rank * sum(shape) for shape in adapted_shapes(lora.targets, shapes)) if lora.rank else 0
    sharded = (places.ranks if places else config.train.ranks) > 1
    frozen = numbers * ((adapters > 0) + (config.train.kl.coefficient > 0 or config.train.teacher_model is not None))
    kept = NUMBER_BYTES[config.model.dtype] if sharded else NUMBER_BYTES["float32"]
    state = (adapters or numbers) * STATE_BYTES + frozen * kept
    if places is None:
        return Mesh(config.train.ranks, config.train.ranks, state)
    count, asked = ranks or places.ranks, config.train.ranks
    return mesh_of(state, count, places.gpus, gpu_bytes, 1 if count % asked else asked)


def engine_bytes(config: Config, model_dir: Path, row_tokens: int) -> dict[str, int]:
    """Bytes that an engine keeps, by part; a row has at most `row_tokens`."""
    number_bytes, numbers = NUMBER_BYTES[config.model.dtype], sum(map(prod, shapes_of(model_dir).values()))
    groups = config.train.groups_per_step * (config.asynchrony.max_staleness + 1)
    running = min(config.engine.max_running, groups * config.rollout.group_size)
    kv_row = sizes_of(model_dir).kv_numbers_per_token * row_tokens
    return {"weights": numbers * number_bytes, "kv": running * kv_row * number_bytes}


def check_fits(config: Config, model_dir: Path, machine_bytes: int | None = None) -> None:
    """Raises `ConfigError` when this host's ranks keep more than the machine's main memory and swap."""
    have = machine_bytes or psutil.virtual_memory().total + psutil.swap_memory().total
    needed = 0 if config.cluster.trainer else trainer_mesh(config, shapes_of(model_dir), 0).state_bytes
    if needed > have:
        raise ConfigError(
            f"model.path: expected a model whose training fits {have / 1e9:.1f} GB of memory; weights, gradients and "
            f"Adam's moments alone take {needed / 1e9:.1f} GB. Set train.lora.rank, or take a smaller model"
        )
