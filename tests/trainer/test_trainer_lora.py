"""Adapters: what is trained, what the engines get, and what a checkpoint holds."""

import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import groups
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from engine_models import saved
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.files import ADAPTER_FILE
from shoal.model.adapter_targets import check_targets_of_files
from shoal.model.file_sizes import shapes_of
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.trainer.trainer import Trainer

HEADS = {"num_key_value_heads": 2}


def trainer(path: Path, **settings: object) -> Trainer:
    config = {"lr": 1e-2, "lora": {"rank": 4, "alpha": 8.0}, **settings}
    return Trainer(path, ModelConfig(device="cpu"), TrainConfig.model_validate(config))


def scored(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return packed_logprobs(model, torch.arange(1, 31), [10, 20])  # type: ignore[arg-type]


def test_engines_get_weights_that_score_as_the_adapted_model_does(tiny_model_dir: Path, tmp_path: Path) -> None:
    ours = trainer(tiny_model_dir)
    plain = load_model(tiny_model_dir)
    before = scored(plain)
    torch.testing.assert_close(scored(ours.model), before)  # adapters begin at zero effect
    for seed in range(3):
        ours.step(groups(seed))
    ours.write_weights(tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig()).tensors().keys()
    plain.load_state_dict(weights)
    torch.testing.assert_close(scored(plain), scored(ours.model), rtol=1e-4, atol=1e-4)
    assert (scored(plain) - before).abs().max() > 0.1


def test_only_adapters_are_trained_and_saved(tiny_model_dir: Path, tmp_path: Path) -> None:
    ours = trainer(tiny_model_dir)
    frozen = {name: p.clone() for name, p in ours.model.named_parameters() if not p.requires_grad}
    ours.step(groups(0))
    for name, p in ours.model.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name]), name
    ours.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(".lora_" in name for name in saved)
    trained = sum(p.numel() for p in ours.model.parameters() if p.requires_grad)
    assert trained == sum(t.numel() for t in saved.values())
    assert trained < sum(t.numel() for t in frozen.values()) / 2


def test_a_resumed_run_goes_on_bit_for_bit(tiny_model_dir: Path, tmp_path: Path) -> None:
    ours, resumed = trainer(tiny_model_dir), trainer(tiny_model_dir)
    ours.step(groups(0))
    ours.save(tmp_path)
    resumed.load(tmp_path)
    wanted, got = ours.step(groups(1)), resumed.step(groups(1))
    assert replace(got, seconds=0.0) == replace(wanted, seconds=0.0)
    assert all(torch.equal(a, resumed.tensors()[name]) for name, a in ours.tensors().items())


def test_two_runs_begin_with_the_same_adapters(tiny_model_dir: Path) -> None:
    torch.manual_seed(1)
    first = trainer(tiny_model_dir).step(groups(0))
    torch.manual_seed(2)
    assert replace(trainer(tiny_model_dir).step(groups(0)), seconds=first.seconds) == first


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_peft_reads_the_published_adapters(tiny_model_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    ours = trainer(tiny_model_dir)
    ours.step(groups(0))
    ours.write_weights(tmp_path / ADAPTER_FILE)
    adapted = PeftModel.from_pretrained(load_model(tiny_model_dir), tmp_path)
    torch.testing.assert_close(scored(adapted), scored(ours.model))


def test_transformers_reads_the_merged_weights_of_a_folder_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    """An adapter's settings beside them would have it add the adapter again."""
    ours = trainer(tiny_model_dir)
    ours.step(groups(0))
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    before = set(tmp_path.iterdir())
    ours.write_weights(tmp_path / "model.safetensors")
    assert set(tmp_path.iterdir()) == before
    torch.testing.assert_close(scored(load_model(tmp_path)), scored(ours.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["q_prj", "proj", "self_attn", "norm", "embed_tokens", ".*q_proj", ""])
def test_names_of_no_linear_layer_are_refused_beside_good_ones_by_the_files_alone(
    tiny_model_dir: Path, wrong: str
) -> None:
    for targets in ([wrong], ["q_proj", wrong]):
        with pytest.raises(ConfigError, match=rf"train\.lora\.targets: .*q_proj.*, got {re.escape(repr(wrong))}"):
            trainer(tiny_model_dir, lora={"rank": 4, "targets": targets})
        with pytest.raises(ConfigError, match=rf"train\.lora\.targets: .*q_proj.*, got {re.escape(repr(wrong))}"):
            check_targets_of_files(targets, shapes_of(tiny_model_dir))


def test_the_files_alone_refuse_what_the_model_refuses(tmp_path: Path) -> None:
    shape = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    dense, tied = (saved("Qwen2", tmp_path / f"{tie}", tie_word_embeddings=tie, **HEADS) for tie in (False, True))
    mixture = saved("Qwen3Moe", tmp_path / "mixture", moe_intermediate_size=24, **shape)
    for path, targets, good in (
        (dense, ["lm_head"], True),
        (tied, ["lm_head"], False),
        (tied, ["layers.1.mlp.down_proj", "q_proj"], True),
        (mixture, [], False),
        (mixture, ["gate_proj"], False),
        (mixture, ["o_proj"], True),
    ):
        for check in (
            lambda path=path, targets=targets: trainer(path, lora={"rank": 2, "targets": targets}),
            lambda path=path, targets=targets: check_targets_of_files(targets, shapes_of(path)),
        ):
            with nullcontext() if good else pytest.raises(ConfigError, match=r"train\.lora\.targets"):
                check()


def test_a_chosen_layer_alone_is_adapted(tiny_model_dir: Path) -> None:
    chosen = trainer(tiny_model_dir, lora={"rank": 4, "targets": ["q_proj"]})
    assert sum(p.numel() for p in chosen.model.parameters() if p.requires_grad) == 2 * (4 * 32 + 32 * 4)


def test_gradient_checkpointing_goes_on_with_adapters_and_changes_nothing(tiny_model_dir: Path) -> None:
    config = TrainConfig.model_validate({"lr": 1e-2, "lora": {"rank": 4}})
    plain, checkpointed = (
        Trainer(tiny_model_dir, ModelConfig(device="cpu", gradient_checkpointing=on), config) for on in (False, True)
    )
    layers = [module for module in checkpointed.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.training for layer in layers)
    wanted, got = plain.step(groups(0)), checkpointed.step(groups(0))
    assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert got.grad_norm > 0
