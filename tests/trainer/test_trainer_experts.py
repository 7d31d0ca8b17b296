"""Weights of a mixture of experts are published as checkpoints of it are saved, and read back by the own engine."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer_objective import row
from transformers import AutoModelForCausalLM

from engine_models import saved
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.engine.compute.weight_loading import WeightSlots
from shoal.errors import RequestRefused
from shoal.model.loading import load_model
from shoal.trainer.trainer import Trainer

EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 1}
KINDS: dict[str, dict[str, object]] = {
    "Qwen3Moe": {"head_dim": 8, "num_experts": 2, "moe_intermediate_size": 24, **EXPERTS},
    "Mixtral": {"num_local_experts": 2, **EXPERTS},
    "GptOss": {"head_dim": 8, "num_local_experts": 2, **EXPERTS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_published_experts_have_the_names_of_the_checkpoint_and_the_engine_reads_them(
    kind: str, tmp_path: Path
) -> None:
    path = saved(kind, tmp_path / "model", **KINDS[kind])
    ours = Trainer(path, ModelConfig(device="cpu"), TrainConfig(lr=1e-2, groups_per_step=1))
    ours.step([[row(random.Random(0), (7, 8), 6, 1.0), row(random.Random(1), (7, 8), 5, -1.0)]])
    file = tmp_path / "published" / "model.safetensors"
    file.parent.mkdir()
    ours.write_weights(file)
    before, after = load_file(path / "model.safetensors"), load_file(file)
    assert after.keys() == before.keys()
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    assert any(".experts." in name and not torch.equal(after[name], before[name]) for name in after)

    (file.parent / "config.json").write_text((path / "config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, attn_implementation="eager").state_dict()
    served = load_model(path)
    slots = WeightSlots(served)
    slots.load(slots.staged(1, file, None))
    for name, tensor in ours.tensors().items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(served.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_file_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    path = saved("Mixtral", tmp_path / "model", **KINDS["Mixtral"])
    tensors = load_file(path / "model.safetensors")
    gone = next(name for name in tensors if ".experts.1." in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, tmp_path / "less.safetensors")
    with pytest.raises(RequestRefused, match="expert"):
        WeightSlots(load_model(path)).staged(1, tmp_path / "less.safetensors", None)
