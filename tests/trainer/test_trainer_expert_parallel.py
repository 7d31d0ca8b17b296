"""Two ranks with half of the experts each, behind the messages of every trainer, train what one rank does."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_ranks import groups

from engine_models import saved
from shoal.config import Config, ModelConfig, parse
from shoal.errors import TrainerError
from shoal.trainer.messages import StepStats
from shoal.trainer.trainer import Trainer
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Sample

MIXTURE = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, object]] = {
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, **MIXTURE},
    "Mixtral": {"num_local_experts": 4, **MIXTURE},
}
LR = 1e-3
"""Tolerance of weights too: Adam's first steps are of this size, whatever sign rounding gives a gradient near 0."""
COURSES = (("Qwen3Moe", "experts"), ("Mixtral", "experts"), ("Mixtral", "sharded"))
FILES = ("model.safetensors", "optimizer.safetensors", "published.safetensors")


def config(ranks: int, backend: str = "experts") -> Config:
    train = {"lr": LR, "minibatches": 2, "backend": backend, "kl": {"coefficient": 0.1}, "ranks": ranks}
    return parse({"tasks": [{"name": "chain_sum"}], "model": {"device": "cpu"}, "train": train})


def rows(seed: int) -> list[tuple[Sample, ...]]:
    return [tuple(group) for group in groups(seed)]


async def course(trainer: TrainerProcess, model: Path, backend: str, out: Path, ranks: int = 2) -> list[StepStats]:
    """Two steps, the second one after a checkpoint was loaded."""
    await trainer.start(model, config(ranks, backend), ranks)
    stats = [await trainer.step(rows(0), 4)]
    await trainer.save(out)
    await trainer.step(rows(2), 4)
    await trainer.load(out)
    stats.append(await trainer.step(rows(1), 4))
    await trainer.write_version(out / FILES[2])
    return stats


def alone(model: Path, out: Path) -> list[StepStats]:
    """The same of one rank."""
    ours = Trainer(model, ModelConfig(device="cpu"), config(1).train)
    stats = [ours.step(rows(0), 4)]
    ours.save(out)
    stats.append(ours.step(rows(1), 4))
    ours.write_weights(out / FILES[2])
    return stats


@pytest.mark.timeout(600)
def test_experts_apart_train_what_all_experts_on_one_rank_do(tiny_model_dir: Path, tmp_path: Path) -> None:
    models = {kind: saved(kind, tmp_path / f"model-{kind}", **settings) for kind, settings in KINDS.items()}
    odd = saved("Mixtral", tmp_path / "odd", num_local_experts=3, **MIXTURE)

    async def main() -> list[list[StepStats]]:
        async with local_ranks(tmp_path / "log", 2, 2) as ranks:
            trainer = TrainerProcess(ranks)
            for model, complaint in ((tiny_model_dir, "a mixture of experts"), (odd, "divides 3 experts, got 2")):
                with pytest.raises(TrainerError, match=f"train.backend: expected .*{complaint}"):
                    await trainer.start(model, config(2), 2)
            return [
                await course(trainer, models[kind], experts, tmp_path / f"{kind}-{experts}")
                for kind, experts in COURSES
            ]

    for kind, experts in COURSES:
        (tmp_path / f"{kind}-{experts}").mkdir()
        (tmp_path / kind).mkdir(exist_ok=True)
    found = asyncio.run(main())
    wanted = {kind: alone(model, tmp_path / kind) for kind, model in models.items()}
    for (kind, experts), stats in zip(COURSES, found, strict=True):
        for one, two in zip(wanted[kind], stats, strict=True):
            for field, value in asdict(one).items():
                if field == "weights":  # fingerprints tell equal bits, and several ranks add in another order
                    continue
                expected = None if value is None else pytest.approx(value, rel=2e-3, abs=1e-4)
                assert field == "seconds" or getattr(two, field) == expected, (kind, experts, field)
        whole = Trainer(models[kind], ModelConfig(device="cpu"), config(1).train)
        published = (tmp_path / f"{kind}-{experts}" / FILES[2]).rename(tmp_path / "published")
        whole.load(tmp_path / f"{kind}-{experts}")
        whole.save(tmp_path / f"{kind}-{experts}")
        published.rename(tmp_path / f"{kind}-{experts}" / FILES[2])
        for file in FILES:
            theirs, ours = (load_file(tmp_path / folder / file) for folder in (f"{kind}-{experts}", kind))
            torch.testing.assert_close(theirs, ours, rtol=2e-3, atol=2e-4 if "optimizer" in file else LR)
