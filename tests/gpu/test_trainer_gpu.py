"""The trainer on a CUDA device with its moments in main memory."""

from pathlib import Path

import pytest
import torch

from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


def row(advantage: float) -> Sample:
    return Sample(
        tokens=(1, 2, 3, 4),
        mask=(0, 0, 1, 1),
        logprobs=(0.0, 0.0, -2.0, -2.0),
        versions=(-1, -1, 0, 0),
        advantages=(0.0, 0.0, advantage, advantage),
    )


def test_offloaded_moments_are_in_main_memory_and_give_the_same_weights(tiny_model_dir: Path) -> None:
    usual, offloaded = (
        Trainer(tiny_model_dir, ModelConfig(device="cuda"), TrainConfig.model_validate({"lr": 1e-3, "offload": kind}))
        for kind in ("none", "optimizer")
    )
    for _ in range(2):
        usual.step([[row(1.0), row(-1.0)]], 0)
        offloaded.step([[row(1.0), row(-1.0)]], 0)
    moments = [one for name, one in offloaded._optimizer.state().items() if name.startswith("exp_avg")]
    assert moments
    assert all(moment.device.type == "cpu" for moment in moments)
    for name, one in offloaded.tensors().items():
        torch.testing.assert_close(one, usual.tensors()[name], rtol=1e-5, atol=1e-7)
