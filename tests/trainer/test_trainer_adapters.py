"""Versions that are adapters: the engine merges them into the weights with which it began."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer import groups
from test_trainer_lora import scored, trainer

from engine_models import saved
from engine_server import PROMPT, threaded
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.engine.compute.weight_loading import WeightSlots
from shoal.errors import ConfigError, RequestRefused
from shoal.files import ADAPTER_FILE
from shoal.model.loading import load_model
from shoal.trainer.trainer import Trainer
from shoal.weights.store import WeightStore


def adapter(model_dir: Path, store: WeightStore, version: int, **settings: object) -> tuple[Path, Trainer]:
    """A Version that is an adapter, and the trainer that wrote it."""
    ours = trainer(model_dir, **settings)
    for seed in range(2):
        ours.step(groups(version + seed))
    ours.write_weights(store.begin(version) / ADAPTER_FILE)
    return store.seal(version).path, ours


def test_an_engine_serves_each_adapter_on_the_weights_with_which_it_began(tiny_model_dir: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    first, one = adapter(tiny_model_dir, store, 1, lora={"rank": 4, "targets": ["q_proj", "down_proj"]})
    second, two = adapter(tiny_model_dir, store, 2, lora={"rank": 2, "alpha": 8.0, "targets": ["v_proj"]})
    assert {path.name for path in first.parent.iterdir()} == {"adapter_config.json", ADAPTER_FILE, "checksum"}
    served = load_model(tiny_model_dir)
    slots = WeightSlots(served)
    for version, path, ours in ((1, first, one), (2, second.parent, two), (3, first, one)):
        slots.load(slots.staged(version, path, None))
        torch.testing.assert_close(scored(served), scored(ours.model), rtol=1e-4, atol=1e-4)
    assert (scored(served) - scored(load_model(tiny_model_dir))).abs().max() > 0.05
    kept = store.kept(1)
    assert kept is not None
    assert kept.path == first


def test_a_whole_model_and_an_adapter_replace_each_other(tiny_model_dir: Path, tmp_path: Path) -> None:
    path, ours = adapter(tiny_model_dir, WeightStore(tmp_path), 1)
    base = load_file(tiny_model_dir / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in base.items()}, tmp_path / "other.safetensors")
    served = load_model(tiny_model_dir)
    slots = WeightSlots(served)
    slots.load(slots.staged(1, tmp_path / "other.safetensors", None))
    slots.load(slots.staged(2, path, None))
    torch.testing.assert_close(scored(served), scored(ours.model), rtol=1e-4, atol=1e-4)


def test_an_adapter_of_another_model_is_refused_by_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    path, _ = adapter(tiny_model_dir, WeightStore(tmp_path), 1)
    slots = WeightSlots(load_model(tiny_model_dir))
    tensors = load_file(path)
    (path.parent / "checksum").unlink()
    for wrong in (
        {name: tensor[:, :3].contiguous() for name, tensor in tensors.items()},
        {name: tensor for name, tensor in tensors.items() if "lora_A" in name},
        {name.replace("layers.0.", "layers.7."): tensor for name, tensor in tensors.items()},
    ):
        save_file(wrong, path)
        with pytest.raises(RequestRefused, match="proj"):
            slots.staged(1, path, None)
    (path.parent / "adapter_config.json").write_text("{}")
    with pytest.raises(RequestRefused, match=r"adapter_config\.json"):
        slots.staged(1, path, None)


def test_an_adapter_is_loaded_over_http_while_the_engine_serves(tiny_model_dir: Path, tmp_path: Path) -> None:
    path, ours = adapter(tiny_model_dir, WeightStore(tmp_path), 1)
    with threaded(tiny_model_dir, weights=tmp_path) as server:
        before = server.ask("/score", {"token_ids": PROMPT})[1]["logprobs"]
        assert server.ask("/update_weights", {"version": 1, "path": str(path)})[1]["version"] == 1
        after = server.ask("/score", {"token_ids": PROMPT})[1]["logprobs"]
    assert after == pytest.approx(ours.logprobs([PROMPT])[0], abs=1e-3)
    assert after != pytest.approx(before, abs=1e-2)
    whole = sum(tensor.nbytes for tensor in ours.tensors().values())
    assert path.stat().st_size < whole / 2
    assert json.loads((path.parent / "adapter_config.json").read_text())["r"] == 4


def test_adapters_of_packed_experts_are_refused_unless_layers_are_named(tmp_path: Path) -> None:
    experts = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}
    path = saved("Qwen3Moe", tmp_path, moe_intermediate_size=24, **experts)
    with pytest.raises(ConfigError, match=r"train\.lora\.targets: .*experts"):
        Trainer(path, ModelConfig(device="cpu"), TrainConfig.model_validate({"lora": {"rank": 2}}))
    named = TrainConfig.model_validate({"lora": {"rank": 2, "targets": ["q_proj"]}})
    assert Trainer(path, ModelConfig(device="cpu"), named).step(groups(0)).grad_norm > 0
