"""The real trainer is made for published models on 8, 64 and 512 fake GPUs: what each rank would hold, and where."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.published_models import PUBLISHED, shortened
from fake_cuda import cuda_of_fakes
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.trainer.fake_run import ShapesOnly, fake_rank
from shoal.trainer.ranks import Ranks, local
from shoal.trainer.trainer import Trainer

LAYERS = 2
"""Layers of the models here; `make gpus` makes all of them."""


@pytest.fixture(params=zip(PUBLISHED, (8, 64, 512) * 2, strict=True), ids=str)
def started(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A published model, and a number of GPUs."""
    name, count = request.param
    (tmp_path / "config.json").write_text(json.dumps(shortened(name, LAYERS)))
    return tmp_path, count


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with cuda_of_fakes():
        yield


def made(path: Path, ranks: Ranks, **train: object) -> Trainer:
    """Trainer of one rank; its tensors have no numbers."""
    model = ModelConfig(device="cuda", dtype="bfloat16", gradient_checkpointing=True)
    return Trainer(path, model, TrainConfig.model_validate(train), ranks=ranks, files=ShapesOnly.of_config(path))


def evenly(shape: torch.Size, ranks: int) -> int:
    """Numbers of the first rank: it has as many rows as any other."""
    return -(-shape[0] // ranks) * shape[1:].numel()


def test_a_rank_holds_its_part_of_float32_weights_on_its_gpu(started: tuple[Path, int]) -> None:
    published, count = started
    with fake_rank(Ranks(0, count), "cuda"):
        ours = made(published, Ranks(0, count))
        weights = dict(ours.model.named_parameters())
    for one in weights.values():
        assert (one.device.type, one.dtype, str(one.placements)) == ("cuda", torch.float32, "(Shard(dim=0),)")  # type: ignore[attr-defined]
        assert local(one).numel() == evenly(one.shape, count)
    assert {buffer.device.type for buffer in ours.model.buffers()} == {"cuda"}


def test_below_adapters_a_rank_holds_its_part_of_bfloat16_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shortened("Llama-3.3-70B", LAYERS)))
    with fake_rank(Ranks(3, 8), "cuda"):
        ours = made(tmp_path, Ranks(3, 8), lora={"rank": 16, "targets": ["q_proj", "v_proj"]})
        weights = dict(ours.model.named_parameters())
        adapters = {id(one) for one in ours._optimizer._named.values()}
    assert all(one.requires_grad == (id(one) in adapters) for one in weights.values())
    assert {one.dtype for one in weights.values() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in weights.values() if not one.requires_grad} == {torch.bfloat16}
    held = sum(local(one).numel() * one.element_size() for one in weights.values())
    assert held < 0.26 * sum(one.numel() for one in weights.values())
    assert {one.device.type for one in weights.values()} == {"cuda"}


@pytest.mark.parametrize("kind", ["experts", "reference"])
def test_experts_apart_and_a_reference_are_parts_too(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shortened("Qwen3-30B-A3B", LAYERS)))
    settings = {"experts": {"backend": "experts"}, "reference": {"kl": {"coefficient": 0.1}}}[kind]
    with fake_rank(Ranks(63, 64), "cuda"):
        ours = made(tmp_path, Ranks(63, 64), **settings)
        reference = list(ours._reference.parameters()) if ours._reference is not None else []
    held = sum(local(one).numel() for one in ours.model.parameters())
    assert held <= sum(-(-one.shape[0] // 64) * one.shape[1:].numel() for one in ours.model.parameters())
    assert {one.dtype for one in reference} <= {torch.bfloat16}
    assert (len(reference) > 0) == (kind == "reference")
