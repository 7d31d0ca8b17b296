"""Two real processes under gloo: each trains a part of an update's rows, and together they do what one does."""

import asyncio
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_train_objective import LOSSES, batch, gradient, row, trainer
from torch import distributed, multiprocessing

from environ import environment_of
from shoal import wire
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.net.process import Child, torch_environment
from shoal.trainer.messages import (
    Answer,
    Done,
    LoadCheckpoint,
    Request,
    SaveCheckpoint,
    StartTrainer,
    Step,
    StepStats,
    TrainerFailed,
    WriteVersion,
    answer_from,
)
from shoal.trainer.packing import Size, size_of
from shoal.trainer.ranks import Ranks, join, leave, local
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

RANKS = 2
CONFIGS = [{"loss": loss, "kl": {"coefficient": 0.1}} for loss in LOSSES] + [{"loss_mean": "budget"}]
ROWS = batch(8, (1, 5, 9, 4, 12, 2, 7))
SHARDED = {
    "several updates": {"minibatches": 2, "weight_decay": 0.1},
    "small micro-batches": {"tokens_per_microbatch": 16, "reset_optimizer_at_push": True},
    "regularised": {"kl": {"coefficient": 0.1}, "entropy_bonus": 0.01},
    "adapters": {"lora": {"rank": 2, "alpha": 4.0}},
}


def groups(seed: int) -> list[list[Sample]]:
    """The second has one row, which cannot be shared, and the last has nothing to teach."""
    rng = random.Random(seed)
    advantages = ((1.0, -1.0, 0.5), (2.0,), (-1.0, 1.0), (0.0, 0.0))
    return [[row(rng, (5 + g, 6), rng.randint(1, 9), a) for a in group] for g, group in enumerate(advantages)]


def sharded(model_dir: Path, name: str, ranks: Ranks) -> Trainer:
    config = TrainConfig.model_validate({"lr": 1e-2, **SHARDED[name]})
    model = ModelConfig(device="cpu", gradient_checkpointing=name == "regularised")
    return Trainer(model_dir, model, config, ranks=ranks)


def course(ours: Trainer, folder: Path) -> list[object]:
    """Two steps, saved after each; their statistics."""
    stats: list[object] = []
    for seed in range(2):
        stats.append(replace(ours.step(groups(seed), version=4), seconds=0.0))
        (folder / str(seed)).mkdir(parents=True, exist_ok=True)
        ours.save(folder / str(seed))
        ours.write_weights(folder / str(seed) / "published.safetensors")
        ours.count_push()
    return stats


def part(rank: int, model_dir: Path, out: Path) -> None:
    """What one rank computes; rank 0 writes the sums."""
    torch.set_num_threads(1)
    ranks = join(rank, RANKS, out / "meeting", "cpu")
    rows = ROWS[:2] if rank == 0 else ROWS[2:]
    own = size_of(rows)
    size = torch.tensor([own.tokens, own.rows])
    distributed.all_reduce(size)
    whole = Size(*size.tolist())
    assert whole == size_of(ROWS)
    for i, config in enumerate(CONFIGS):
        found, loss = gradient(trainer(model_dir, **config), rows, whole=whole)
        both = torch.cat([found, torch.tensor([loss])])
        distributed.all_reduce(both)
        if rank == 0:
            torch.save(both, out / f"{i}.pt")
    for name in SHARDED:
        folder = out / name
        stats = course(sharded(model_dir, name, ranks), folder)
        if rank == 0:
            (folder / "stats").write_bytes(wire.encode(stats))
        resumed = sharded(model_dir, name, ranks)
        if resumed._reference is not None:  # each rank keeps its part of the reference, as of what is trained
            kept = sum(local(p).numel() for p in resumed._reference.parameters())
            assert kept < 0.6 * sum(p.numel() for p in resumed._reference.parameters())
        distributed.barrier()  # the first rank may still be writing
        resumed.load(folder / "0")
        moments = [tensor for key, tensor in resumed._optimizer.state().items() if key.startswith("exp_avg")]
        assert 0 < sum(local(one).numel() for one in moments) < 0.6 * sum(one.numel() for one in moments)
        resumed.count_push()
        resumed.step(groups(1), version=4)
        (folder / "resumed").mkdir(exist_ok=True)
        resumed.save(folder / "resumed")
    leave()


@pytest.fixture(scope="module")
def results(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(part, (tiny_model_dir, out), nprocs=RANKS)
    return out


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_the_gradients_of_two_ranks_add_up_to_that_of_one(tiny_model_dir: Path, results: Path, index: int) -> None:
    wanted, loss = gradient(trainer(tiny_model_dir, **CONFIGS[index]), ROWS)
    found = torch.load(results / f"{index}.pt")
    torch.testing.assert_close(found, torch.cat([wanted, torch.tensor([loss])]), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_train_publish_and_save_what_one_does(
    tiny_model_dir: Path, tmp_path: Path, results: Path, name: str
) -> None:
    wanted = course(sharded(tiny_model_dir, name, Ranks()), tmp_path)
    found = wire.decode((results / name / "stats").read_bytes(), list[dict[str, object]], 1 << 20)
    for ours, theirs in zip(found, wanted, strict=True):
        for field, value in ours.items():
            expected = getattr(theirs, field)
            assert value == (None if expected is None else pytest.approx(expected, rel=2e-3, abs=1e-4)), field
    for path in sorted(tmp_path.rglob("*.safetensors")):
        one, two = load_file(path), load_file(results / name / path.relative_to(tmp_path))
        torch.testing.assert_close(two, one, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_go_on_from_a_checkpoint_bit_for_bit(results: Path, name: str) -> None:
    for file in ("model", "optimizer"):
        resumed, straight = (load_file(results / name / step / f"{file}.safetensors") for step in ("resumed", "1"))
        assert all(torch.equal(tensor, straight[key]) for key, tensor in resumed.items())


def test_a_checkpoint_of_two_ranks_is_read_by_one(tiny_model_dir: Path, results: Path) -> None:
    ours = sharded(tiny_model_dir, "several updates", Ranks())
    ours.load(results / "several updates" / "0")
    ours.count_push()
    ours.step(groups(1), version=4)
    wanted = load_file(results / "several updates" / "1" / "model.safetensors")
    torch.testing.assert_close(ours.tensors(), wanted, rtol=2e-3, atol=2e-4)


def follower_of(pid: int) -> int:
    (follower,) = psutil.Process(pid).children()
    return follower.pid


def test_the_trainer_process_starts_its_ranks_and_says_when_one_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"lr": 1e-2, "ranks": 2})
    request = StartTrainer(str(tiny_model_dir), ModelConfig(device="cpu").model_dump_json(), config.model_dump_json())
    rows = tuple(map(tuple, groups(0)))
    (scratch := tmp_path / "scratch").mkdir()
    environment = {**torch_environment(1, ["5", "7"]), "TMPDIR": str(scratch)}

    async def main() -> None:
        async with Child("trainer", "shoal.trainer.worker", [], tmp_path / "log", environment) as child:

            async def ask(request: Request) -> Answer:
                return answer_from(await child.ask(wire.encode(request), 120))

            assert isinstance(await ask(request), Done)
            assert any(scratch.iterdir())  # where the ranks meet
            assert [environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in (child.pid, follower_of(child.pid))] == [
                "5",
                "7",
            ]
            assert isinstance(await ask(SaveCheckpoint(str(tmp_path))), Done)
            first = await ask(Step(rows))
            assert isinstance(first, Done)
            assert isinstance(first.value, StepStats)
            refused = await ask(Step((((Sample((1, 10**6), (0, 1), (0.0, -1.0), (-1, 0), (0.0, 1.0))),),)))
            assert isinstance(refused, TrainerFailed)
            assert "expected ids in" in refused.reason
            unwritten = await ask(SaveCheckpoint(str(tmp_path / "nowhere")))
            assert isinstance(unwritten, TrainerFailed)
            assert "cannot be written" in unwritten.reason
            assert isinstance(await ask(LoadCheckpoint(str(tmp_path))), Done)
            again = await ask(Step(rows))
            assert isinstance(again, Done)
            assert isinstance(again.value, StepStats)
            assert replace(again.value, seconds=0.0) == replace(first.value, seconds=0.0)
            assert isinstance(await ask(WriteVersion(str(tmp_path / "published.safetensors"))), Done)

            os.kill(follower_of(child.pid), signal.SIGKILL)
            lost = await ask(Step(rows))
            assert isinstance(lost, TrainerFailed)
            assert "rank 1 of the trainer" in lost.reason
            child._writer.close()
            assert (await asyncio.wait_for(child.died(), 20)).returncode == 0
        assert not any(scratch.iterdir())

    asyncio.run(main())
    ours = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(lr=1e-2))
    ours.step(rows)
    torch.testing.assert_close(
        load_file(tmp_path / "published.safetensors"), dict(ours.tensors()), rtol=2e-3, atol=2e-4
    )
