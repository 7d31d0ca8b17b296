"""Memory that the processes of a run keep for as long as they live: a lower bound, from model files and settings."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import psutil

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.model.adapter_targets import adapted_shapes
from shoal.model.file_sizes import shapes_of, sizes_of

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
WEIGHT_BYTES = 4  # float32 in the trainer
TRAINED_BYTES = 12  # gradient and Adam's two moments


def kept_bytes(config: Config, model_dir: Path, row_tokens: int) -> dict[str, dict[str, int]]:
    """Bytes that an engine and each rank of the trainer keep, by part; a row has at most `row_tokens`.

    The program (about 400 MB), activations, logits and copies of weights in use are not counted.
    """
    shapes, number_bytes = shapes_of(model_dir), NUMBER_BYTES[config.model.dtype]
    numbers, lora, places = sum(map(prod, shapes.values())), config.train.lora, config.cluster.trainer
    ranks = (places.per_host or places.ranks) if places else config.train.ranks
    adapters = sum(lora.rank * sum(shape) for shape in adapted_shapes(lora.targets, shapes)) if lora.rank else 0
    groups = config.train.groups_per_step * (config.asynchrony.max_staleness + 1)
    running = min(config.engine.max_running, groups * config.rollout.group_size)
    kv_row = sizes_of(model_dir).kv_numbers_per_token * row_tokens
    return {
        "engine": {"weights": numbers * number_bytes, "kv": running * kv_row * number_bytes},
        "trainer": {
            "weights": (numbers + adapters) * WEIGHT_BYTES // ranks,
            "gradient_and_moments": (adapters or numbers) * TRAINED_BYTES // ranks,
            "reference": numbers * WEIGHT_BYTES // ranks if config.train.kl.coefficient else 0,
        },
    }


def check_fits(config: Config, kept: Mapping[str, Mapping[str, int]], machine_bytes: int | None = None) -> None:
    """Raises `ConfigError` when this host's ranks keep more than the machine's main memory and swap."""
    have = machine_bytes or psutil.virtual_memory().total + psutil.swap_memory().total
    needed = 0 if config.cluster.trainer else config.train.ranks * sum(kept["trainer"].values())
    if needed > have:
        raise ConfigError(
            f"model.path: expected a model whose training fits {have / 1e9:.1f} GB of memory; weights, gradients and "
            f"Adam's moments alone take {needed / 1e9:.1f} GB. Set train.lora.rank, or take a smaller model"
        )
