"""torchtitan behind the messages of every trainer: two ranks with half of the experts each train what one rank does."""

import asyncio
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_expert_parallel import FILES, KINDS, LR, course

from engine_models import saved
from shoal.errors import TrainerError
from shoal.trainer.messages import StepStats
from shoal.trainer.worker import TrainerProcess, local_ranks

PACKAGES = os.environ.get("SHOAL_TORCHTITAN", "")
pytestmark = [
    pytest.mark.torchtitan,
    pytest.mark.skipif(not PACKAGES, reason="needs torchtitan beside the environment: make torchtitan"),
]
CLOSE = ("loss", "grad_norm", "update_norm", "entropy", "ratio_mean")


async def taken(model: Path, out: Path, ranks: int, experts: str) -> list[StepStats]:
    """The course of the experts' test, on so many ranks."""
    async with local_ranks(out / "log", ranks, ranks) as started:
        return await course(TrainerProcess(started), model, experts, out, ranks)


@pytest.mark.timeout(900)
def test_torchtitan_s_experts_apart_train_what_they_do_on_one_rank_and_about_what_shoal_s_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", PACKAGES)
    settings = {**KINDS["Qwen3Moe"], "norm_topk_prob": True, "head_dim": 16, "moe_intermediate_size": 32}
    mixture = saved("Qwen3Moe", tmp_path / "mixture", **settings)
    courses = {"two": (2, "torchtitan"), "one": (1, "torchtitan"), "own": (1, "sharded")}
    for name in (*courses, "other"):
        (tmp_path / name).mkdir()
    found = {name: asyncio.run(taken(mixture, tmp_path / name, *how)) for name, how in courses.items()}
    for step in range(2):
        two, one, own = (asdict(found[name][step]) for name in ("two", "one", "own"))
        for field in CLOSE:
            # Experts are in bfloat16, and Adam's first steps are as large whatever the sign of a gradient near 0.
            assert two[field] == pytest.approx(one[field], rel=2e-2 if step else 2e-3, abs=1e-4), (step, field)
            assert one[field] == pytest.approx(own[field], rel=0.1, abs=0.02), (step, field, "experts are in bfloat16")
    for file in FILES:
        alone, apart = (load_file(tmp_path / name / file) for name in ("one", "two"))
        assert apart.keys() == alone.keys()
        off = [(apart[name].float() - one.float()).abs().flatten() for name, one in alone.items()]
        assert float(torch.cat(off).mean()) < 0.1 * LR, file
    versions = [load_file(tmp_path / name / FILES[2]) for name in ("two", "own")]
    assert {name: one.shape for name, one in versions[0].items()} == {n: one.shape for n, one in versions[1].items()}
    off = [(versions[0][name] - one).abs().flatten() for name, one in versions[1].items()]
    assert float(torch.cat(off).mean()) < LR
    with pytest.raises(TrainerError, match=r"train\.experts: expected a model with model_type 'qwen3_moe'"):
        asyncio.run(taken(tiny_model_dir, tmp_path / "other", 1, "torchtitan"))
