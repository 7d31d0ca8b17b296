"""Every backend, on real processes under gloo, takes the steps of one plain rank to the same files."""

import asyncio
import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer_objective import row
from torch import distributed

from engine_models import saved
from rank_processes import run_ranks
from shoal import wire
from shoal.config import ModelConfig, parse
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError, ModelError
from shoal.model.loading import load_model
from shoal.model.tensor_files import FILE, TensorFiles
from shoal.net.listening import free_port
from shoal.trainer.messages import StepStats, TokensFile
from shoal.trainer.ranks import ALONE, Ranks, local
from shoal.trainer.sharded_start import loaded, move
from shoal.trainer.trainer import Trainer
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Sample

FAMILIES = {
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "Llama": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
HAS_TITAN = importlib.util.find_spec("torchtitan") is not None
TITAN = pytest.mark.torchtitan
CASES = [
    pytest.param("sharded", 2, 2, id="FSDP2"),
    pytest.param("torchtitan", 2, 2, id="torchtitan's FSDP2", marks=TITAN),
    pytest.param("torchtitan:2", 2, 2, id="torchtitan's tensor parallelism", marks=TITAN),
    pytest.param("torchtitan:2", 4, 4, id="torchtitan's both", marks=TITAN),
    pytest.param("torchtitan:2", 8, 4, id="torchtitan's both, and two copies", marks=TITAN),
]
SETTINGS = {
    "several updates": {"minibatches": 2, "weight_decay": 0.1},
    "small micro-batches": {"tokens_per_microbatch": 16, "loss": {"name": "m2po", "clip_high": 0.05}},
    "against a reference": {"kl": {"coefficient": 0.1}, "entropy_bonus": 0.01, "advantage": "batch"},
}
BFLOAT16 = "bfloat16"
"""Backends round activations in other places than a plain rank does."""


def groups(seed: int) -> list[list[Sample]]:
    """The second has one row, which cannot be shared, and the last has nothing to teach."""
    rng = random.Random(seed)
    advantages = ((1.0, -1.0, 0.5), (2.0,), (-1.0, 1.0), (0.0, 0.0))
    return [[row(rng, (5 + g, 6), rng.randint(1, 9), a) for a in group] for g, group in enumerate(advantages)]


def started(model_dir: Path, name: str, backend: str, ranks: Ranks) -> Trainer:
    settings = {"lr": 1e-2, "backend": backend, **SETTINGS.get(name, {"lr": 1e-3})}
    # Ranks that offload their moments take the steps of one rank that does not.
    offload = "optimizer" if ranks.count > 1 and name == "several updates" else "none"
    config = TrainConfig.model_validate({**settings, "offload": offload})
    dtype = "bfloat16" if name == BFLOAT16 else "float32"
    return Trainer(model_dir, ModelConfig(device="cpu", dtype=dtype), config, ranks=ranks)


def course(ours: Trainer, folder: Path) -> list[object]:
    """Two steps, saved after each; their statistics."""
    stats: list[object] = []
    for seed in range(2):
        there = folder / str(seed)
        there.mkdir(parents=True, exist_ok=True)
        wish = TokensFile(str(there / "tokens" / "1.safetensors"), tuple("abcd"))
        stats.append(replace(ours.step(groups(seed), version=4, tokens_file=wish), seconds=0.0))
        ours.save(there)
        ours.write_weights(there / "published.safetensors")
        ours.count_push()
    return stats


def part(
    rank: int, models: dict[str, Path], names: list[str], ranks: Ranks, backend: str, master: str, out: Path
) -> None:
    """What one rank computes; rank 0 writes the statistics."""
    torch.set_num_threads(1)
    ranks = replace(ranks, index=rank)
    ranks.meet(master, "cpu")
    for family, model_dir in models.items():
        for name in names:
            folder = out / family / name
            ours = started(model_dir, name, backend, ranks)
            weights = list(ours.model.parameters())
            assert sum(local(one).numel() for one in weights) < 0.6 * sum(one.numel() for one in weights)
            stats = course(ours, folder)
            if rank == 0:
                (folder / "stats").write_bytes(wire.encode(stats))
            resumed = started(model_dir, name, backend, ranks)
            distributed.barrier()  # another rank may still be writing
            resumed.load(folder / "0")
            resumed.count_push()
            resumed.step(groups(1), version=4)
            (folder / "resumed").mkdir(exist_ok=True)
            resumed.save(folder / "resumed")
    distributed.destroy_process_group()


@pytest.mark.parametrize(("backend", "count", "per_copy"), CASES)
def test_a_backend_takes_the_steps_of_one_plain_rank(tmp_path: Path, backend: str, count: int, per_copy: int) -> None:
    if backend.startswith("torchtitan") and not HAS_TITAN:
        pytest.skip("torchtitan is not here: make test-torchtitan")
    models = {kind: saved(kind, tmp_path / kind, vocabulary=96, **more) for kind, more in FAMILIES.items()}
    names, out = [*SETTINGS, BFLOAT16], tmp_path / "several"
    ranks = Ranks(0, count, None if per_copy == count else per_copy, shared_disk=True)
    run_ranks(part, (models, names, ranks, backend, f"127.0.0.1:{free_port()}", out), count)
    for family, model_dir in models.items():
        for name in names:
            one, several = tmp_path / "one" / family / name, out / family / name
            agree(
                course(started(model_dir, name, "sharded", Ranks()), one),
                one,
                several,
                0.1 if name == BFLOAT16 else 2e-3,
            )
            for file in ("model", "optimizer"):
                resumed, straight = (load_file(several / step / f"{file}.safetensors") for step in ("resumed", "1"))
                assert all(torch.equal(tensor, straight[key]) for key, tensor in resumed.items()), name


def agree(wanted: list[object], one: Path, several: Path, rel: float) -> None:
    """Asserts that statistics, Versions and checkpoints are those of one rank, up to rounding."""
    found = wire.decode((several / "stats").read_bytes(), list[dict[str, object]], 1 << 20)
    for ours, theirs in zip(found, wanted, strict=True):
        # Fingerprints tell equal bits, and several ranks add in another order; so tokens at a bin's edge change bins.
        for field in ours.keys() - ({"weights", "ratio_shares"} if several.name == BFLOAT16 else {"weights"}):
            expected = getattr(theirs, field)
            wished = None if expected is None else pytest.approx(expected, rel=rel, abs=rel / 20)
            assert ours[field] == wished, f"{field} of {several}"
    for step in ("0", "1"):
        for name in ("model", "optimizer", "published"):
            mine, theirs = (load_file(folder / step / f"{name}.safetensors") for folder in (several, one))
            torch.testing.assert_close(mine, theirs, rtol=rel, atol=rel / 10)
            if moments := [key for key in theirs if key.startswith("exp_avg/")]:
                found, exact = (torch.cat([one[key].flatten() for key in moments]) for one in (mine, theirs))
                assert (found - exact).norm() < rel * exact.norm(), several
        # Each row is in one file of token numbers.
        mine, theirs = (
            [
                row
                for path in (folder / step / "tokens").iterdir()
                for row in load_file(path).get("row_R", torch.empty(0)).tolist()
            ]
            for folder in (several, one)
        )
        assert sorted(mine) == sorted(theirs)


@TITAN
def test_ranks_of_a_layer_get_the_same_rows_from_a_run(tmp_path: Path) -> None:
    if not HAS_TITAN:
        pytest.skip("torchtitan is not here: make test-torchtitan")
    model_dir = saved("Qwen3", tmp_path / "model", vocabulary=96, **FAMILIES["Qwen3"])
    train = {"lr": 1e-2, "ranks": 2, "backend": "torchtitan:2"}
    config = parse({"tasks": [{"name": "chain_sum"}], "model": {"device": "cpu"}, "train": train})
    rows = [tuple(group) for group in groups(0)]

    async def main() -> StepStats:
        async with local_ranks(tmp_path / "log", 2, 2) as ranks:
            trainer = TrainerProcess(ranks)
            await trainer.start(model_dir, config, 2)
            stats = await trainer.step(rows)
            await trainer.write_version(tmp_path / "published.safetensors")
            return stats

    found, ours = asyncio.run(main()), Trainer(model_dir, ModelConfig(device="cpu"), TrainConfig(lr=1e-2))
    assert found.loss == pytest.approx(ours.step(rows).loss, rel=2e-3)
    torch.testing.assert_close(
        load_file(tmp_path / "published.safetensors"), dict(ours.tensors()), rtol=2e-3, atol=2e-4
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lora": {"rank": 2}}, "train.backend: expected 'sharded' with adapters or router_replay, got 'torchtitan:2'"),
        ({"router_replay": True}, "train.backend: expected 'sharded' with adapters or router_replay"),
        ({"backend": "torchtitan:0"}, "train.backend"),
        ({"backend": "megatron"}, "train.backend"),
    ],
)
def test_settings_that_a_backend_lacks_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse({"tasks": [{"name": "chain_sum"}], "train": {"backend": "torchtitan:2", **settings}})


@TITAN
@pytest.mark.parametrize(
    ("kind", "more", "checkpointing", "ranks", "complaint"),
    [
        ("Llama", {}, False, Ranks(), "one of 1 ranks that split a layer over 2"),
        ("Llama", {}, False, Ranks(0, 3), "one of 3 ranks that split a layer over 2"),
        ("Llama", {}, True, Ranks(0, 2), "model.gradient_checkpointing"),
        ("Llama", {"attention_bias": True}, False, Ranks(0, 2), "a llama model"),
        ("Qwen2", {"num_key_value_heads": 2}, False, Ranks(0, 2), "a qwen2 model"),
        ("Llama", {"num_key_value_heads": 1}, False, Ranks(0, 2), "num_key_value_heads 1 over 2 ranks"),
    ],
)
def test_what_torchtitan_lacks_is_refused(
    tmp_path: Path, kind: str, more: dict[str, object], checkpointing: bool, ranks: Ranks, complaint: str
) -> None:
    if not HAS_TITAN:
        pytest.skip("torchtitan is not here: make test-torchtitan")
    path = saved(kind, tmp_path, vocabulary=96, **more)
    model = ModelConfig(device="cpu", gradient_checkpointing=checkpointing)
    with pytest.raises(ConfigError, match=f"train.backend: expected 'sharded' for what torchtitan lacks: {complaint}"):
        Trainer(path, model, TrainConfig(backend="torchtitan:2"), ranks=ranks)


def test_a_backend_that_is_not_here_is_refused(tiny_model_dir: Path) -> None:
    wanted = "for what torchtitan lacks" if HAS_TITAN else "without torchtitan 0.3.0 here: No module named"
    with pytest.raises(ConfigError, match=wanted):
        Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(backend="torchtitan"))


def test_one_rank_checks_a_model_on_the_device_that_it_trains_on(tiny_model_dir: Path) -> None:
    with pytest.raises(ModelError, match="meta"):  # no logprob is computed there
        loaded(tiny_model_dir, ALONE, "meta")


def test_a_model_that_is_filled_has_the_buffers_of_its_checkpoint(tmp_path: Path) -> None:
    shape = {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    path = saved("Glm4Moe", tmp_path, first_k_dense_replace=1, **shape)
    tensors, name = load_file(path / FILE), "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file({**tensors, name: torch.tensor([1.0, 2.0, 3.0, 4.0])}, path / FILE, {"format": "pt"})
    assert loaded(path, ALONE, "cpu", files=TensorFiles(path)).get_buffer(name).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_has_memory_moves_to_the_device_as_it_is(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir)
    frozen, trained = list(model.parameters())[:2]
    frozen.requires_grad_(False)
    shapes = [one.shape for one in model.parameters()]
    move(model, "meta")
    assert [one.shape for one in model.parameters()] == shapes
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert [one.requires_grad for one in model.parameters()][:2] == [False, trained.requires_grad]
