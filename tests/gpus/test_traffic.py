"""What a rank of many sends and multiplies in one update, by type: fake tensors, real trainer, published models."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.published_models import shortened
from collectives import Log
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.trainer.fake_run import ShapesOnly, fake_rank
from shoal.trainer.packing import Minibatch, RowBatch
from shoal.trainer.ranks import Ranks
from shoal.trainer.step_stats import StepTotals
from shoal.trainer.trainer import Moment, Trainer
from shoal.types import Sample

TOKENS = 640
LAYERS = 2
MICRO_BATCHES = 2
FEW = {"vocab_size": 8192, "num_experts": 16, "num_local_experts": 16}
"""Settings of published models that change how much is sent and multiplied, not of which type."""


def sample(first: int) -> Sample:
    half = TOKENS // 2
    trained = (0,) * half + (1,) * half
    ids = tuple(range(first, first + TOKENS))
    return Sample(
        ids, trained, tuple(-1.0 * m for m in trained), tuple(m - 1 for m in trained), tuple(map(float, trained))
    )


def update(path: Path, model: str, ranks: Ranks, *, memory_bytes: int = 1 << 50, **train: object) -> tuple[Log, int]:
    """What one update sends; and the number of trained numbers. Nothing inside may read a number from the device."""
    few = {key: value for key, value in FEW.items() if key in shortened(model, LAYERS)}
    (path / "config.json").write_text(json.dumps({**shortened(model, LAYERS), **few}))
    settings = ModelConfig(device="cpu", dtype="bfloat16", gradient_checkpointing=True)
    with fake_rank(ranks, "cpu"):
        config = TrainConfig.model_validate(train)
        ours = Trainer(path, settings, config, ranks=ranks, files=ShapesOnly.of_config(path))
        ours.keep_gradients(memory_bytes)
        batch = ours.micro_batch(RowBatch((sample(0), sample(5000)), (1.0, 1.0)))
        both = Minibatch((batch,) * MICRO_BATCHES, informative=True, tokens=TOKENS, skipped_tokens=0)
        with Log() as log:
            ours.accumulate(both, StepTotals("cpu"), Moment(), fresh=True)
            ours._optimizer._launched()
        return log, sum(one.numel() for one in ours.model.parameters() if one.requires_grad)


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B", "GPT-OSS-120B"])
def test_weights_travel_and_multiply_in_bfloat16_and_gradients_travel_once_in_float32(
    tmp_path: Path, model: str
) -> None:
    log, numbers = update(tmp_path, model, Ranks(0, 8))
    assert log.dtypes("all-gather") == {torch.bfloat16}
    assert log.dtypes("reduce-scatter") == {torch.float32}
    # Rows that 8 does not divide are padded.
    assert log.sent["reduce-scatter", torch.float32] == pytest.approx(4 * numbers, rel=0.001)
    # In the forward and the backward pass, but the embedding and the head once.
    assert log.sent["all-gather", torch.bfloat16] <= 2 * 2 * MICRO_BATCHES * numbers * 1.001
    assert log.dtypes("mm") == {torch.bfloat16}
    assert log.dtypes("_grouped_mm") == (set() if model == "Qwen3-8B" else {torch.bfloat16})


def test_without_room_for_whole_gradients_they_are_summed_after_each_micro_batch(tmp_path: Path) -> None:
    log, numbers = update(tmp_path, "Qwen3-8B", Ranks(0, 8), memory_bytes=1)
    assert log.sent["reduce-scatter", torch.float32] == pytest.approx(4 * numbers * MICRO_BATCHES, rel=0.001)


def test_copies_of_the_weights_meet_once_in_an_update_whatever_the_room(tmp_path: Path) -> None:
    log, numbers = update(tmp_path, "Qwen3-8B", Ranks(0, 64, 8), memory_bytes=1)
    parts = log.sent["all-reduce", torch.float32]
    assert parts == pytest.approx(4 * numbers / 8, rel=0.001)
    assert log.sent["reduce-scatter", torch.float32] == pytest.approx(4 * numbers * MICRO_BATCHES, rel=0.001)


def test_below_adapters_only_these_have_gradients_that_travel(tmp_path: Path) -> None:
    log, numbers = update(tmp_path, "Qwen3-8B", Ranks(0, 8), lora={"rank": 16})
    assert log.dtypes("all-gather") == {torch.bfloat16}
    assert log.sent["reduce-scatter", torch.float32] == pytest.approx(4 * numbers, rel=0.01)
