"""The planner: a fake step's memory decides what a run gets, and what is refused."""

from pathlib import Path

import pytest

from shoal.config import Config, parse
from shoal.errors import ConfigError
from shoal.model.file_sizes import shapes_of
from shoal.net.process import torch_environment
from shoal.run.machine.memory import CONTEXT_BYTES, Fit, engine_bytes, fitted, memory_of_gpu, trainer_mesh

ROW_TOKENS = 600


def config_of(folder: Path, *settings: str) -> Config:
    return parse({"run_dir": str(folder / "run"), "tasks": [{"name": "gcd"}]}, ["model.dtype=bfloat16", *settings])


def planned(folder: Path, model: Path, gpu_bytes: int, *settings: str) -> tuple[Config, Fit]:
    config = config_of(folder, "train.ranks=4", *settings)
    return fitted(config, model, trainer_mesh(config, shapes_of(model), gpu_bytes), ROW_TOKENS, gpu_bytes)


def test_a_large_gpu_gets_the_largest_micro_batch_and_a_small_one_less_or_checkpointing_and_no_moments(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config, large = planned(tmp_path, tiny_model_dir, memory_of_gpu("h200"))
    assert (config.train.tokens_per_microbatch, large.checkpointing) == (32768, False)
    assert large.fits
    own = large.needed_bytes - CONTEXT_BYTES
    config, small = planned(tmp_path, tiny_model_dir, int(CONTEXT_BYTES + own / 8))
    assert config.train.tokens_per_microbatch == small.tokens < 32768 / 4
    assert small.needed_bytes <= CONTEXT_BYTES + own / 8
    settings = ("train.tokens_per_microbatch=32768", "train.offload=optimizer")
    config, saving = planned(tmp_path, tiny_model_dir, int(CONTEXT_BYTES + own * 0.7), *settings)
    assert (config.train.tokens_per_microbatch, config.model.gradient_checkpointing) == (32768, True)
    assert large.moments > saving.moments == 0
    with pytest.raises(ConfigError, match=r"expected a step that fits its GPUs, got .* GB of each GPU"):
        planned(tmp_path, tiny_model_dir, CONTEXT_BYTES, "model.gradient_checkpointing=true")


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        (("engine.gpus=shared", "engine.count=5"), 2),
        (("engine.gpus=[0, 1, 4, 4, 4]", "engine.count=5", "train.gpus=[0, 1, 2, 3]"), 1),
        (("engine.gpus=shared", 'engine.urls=["http://127.0.0.1:1"]'), 0),
    ],
)
def test_engines_on_the_gpu_of_a_rank_leave_a_step_less_memory(
    settings: tuple[str, ...], engines: int, tmp_path: Path, tiny_model_dir: Path
) -> None:
    config, fit = planned(tmp_path, tiny_model_dir, memory_of_gpu("h200"), *settings)
    kept = sum(engine_bytes(config, tiny_model_dir, ROW_TOKENS).values())
    assert fit.gpu_bytes == memory_of_gpu("h200") - engines * kept


def test_an_unknown_gpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--gpu: expected one of .*, got 'h20'; did you mean 'h200'"):
        memory_of_gpu("h20")


def test_the_ranks_of_one_copy_can_be_set(tmp_path: Path, tiny_model_dir: Path) -> None:
    there = ("cluster.listen=127.0.0.1:0", "cluster.trainer.hosts=4", "cluster.trainer.gpus=8")
    shapes = shapes_of(tiny_model_dir)
    found = [
        trainer_mesh(config_of(tmp_path, *there, *more), shapes, memory_of_gpu("h100")).per_copy
        for more in ((), ("train.ranks=16",), ("train.ranks=32",))
    ]
    assert found == [8, 16, None]
    with pytest.raises(ConfigError, match=r"train\.ranks: expected the ranks of one copy"):
        config_of(tmp_path, *there, "train.ranks=3")


def test_a_process_with_a_gpu_of_its_own_calls_it_the_first() -> None:
    assert torch_environment(1, ["3"])["LOCAL_RANK"] == "0"
