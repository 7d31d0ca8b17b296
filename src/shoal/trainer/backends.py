"""Backends: each shards the model of a run over its ranks, and computes with it.

A backend gives transformers' model with parameters on every rank. All else works by these names: the optimizer,
Versions, checkpoints. `tests/trainer/test_trainer_backends.py` holds every backend to one plain rank.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import nn
from transformers import PreTrainedModel

from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.model.loading import DTYPES
from shoal.model.tensor_files import Tensors
from shoal.model.training_forward import Forward, fastest_forward
from shoal.trainer.adapters import Adapters
from shoal.trainer.ranks import Ranks
from shoal.trainer.sharded_start import trained_model


class Started(NamedTuple):
    """A model in training, sharded over the ranks."""

    model: PreTrainedModel
    """Its parameters are those that are trained, under transformers' names."""
    adapters: Adapters | None
    root: nn.Module
    """Module that gathers weights and sums gradients."""
    forward: Forward


class TrainerBackend(Protocol):
    """Starts a model in training."""

    def __call__(
        self,
        path: Path | str,
        model: ModelConfig,
        train: TrainConfig,
        ranks: Ranks,
        device: str,
        files: Tensors | None = None,
    ) -> Started:
        """Model at `path`, whose tensors come from `files` instead, if given.

        All ranks call it. Raises `ModelError` and `ConfigError`.
        """


def own(
    path: Path | str, model: ModelConfig, train: TrainConfig, ranks: Ranks, device: str, files: Tensors | None = None
) -> Started:
    """Shoal's own: FSDP2 over transformers' modules, and a rank alone computes by hand where that is known."""
    trained, adapters = trained_model(path, model, train, ranks, device, files)
    by_hand = ranks.count == 1 and not model.gradient_checkpointing and adapters is None
    return Started(trained, adapters, trained, fastest_forward(trained, DTYPES[model.dtype]) if by_hand else trained)


def torchtitan(
    path: Path | str, model: ModelConfig, train: TrainConfig, ranks: Ranks, device: str, files: Tensors | None = None
) -> Started:
    """torchtitan, which also splits layers."""
    try:
        from shoal.trainer import titan
    except ImportError as error:
        raise ConfigError(
            f"train.backend: expected 'sharded' without torchtitan 0.3.0 here: {error}; pip install --no-deps "
            "torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 triton"
        ) from None
    trained, root, forward = titan.started(path, model, ranks, device, files)
    return Started(trained, None, root, forward)


BACKENDS: Mapping[str, TrainerBackend] = {"sharded": own, "experts": own, "torchtitan": torchtitan}


def started(
    path: Path | str, model: ModelConfig, train: TrainConfig, ranks: Ranks, device: str, files: Tensors | None = None
) -> Started:
    """Model in training, from the backend that the settings name."""
    return BACKENDS[train.backend.partition(":")[0]](path, model, train, ranks, device, files)
