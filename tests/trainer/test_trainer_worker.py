"""The trainer process, driven over its real socket."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from environ import environment_of
from shoal import wire
from shoal.config import parse
from shoal.errors import TrainerError
from shoal.trainer.messages import (
    ComputeLogprobs,
    FindRows,
    FinishSave,
    Request,
    SaveCheckpoint,
    StartTrainer,
    Step,
    TrainerFailed,
    WriteVersion,
    answer_from,
    request_from,
)
from shoal.trainer.packing import Packer
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Sample

ROW = Sample((1, 2, 3), (0, 1, 1), (0.0, -4.0, -5.0), (-1, 0, 0), (0.0, 1.0, 1.0))


CONFIG = parse(
    {
        "tasks": [{"name": "chain_sum"}],
        "model": {"device": "cpu"},
        "train": {"lr": 1e-2, "loss_mean": "budget"},
        "rollout": {"max_tokens": 16, "temperature": 0.5},
    }
)


async def test_rows_without_advantage_are_a_part_of_the_influence_of_their_group(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"loss_mean": "tokens", "max_grad_norm": 1e9})}
    )
    idle = replace(ROW, tokens=(1, 4, 5), advantages=(0.0, 0.0, 0.0))
    given = [(ROW, idle, idle), (replace(ROW, tokens=(2, 5, 6)),)]
    async with local_ranks(tmp_path / "log", 1) as ranks:
        trainer = TrainerProcess(ranks, timeout_s=120)
        await trainer.start(tiny_model_dir, config, 1)
        found = await trainer.influences(given, 0, 0)
    (one, along), (other, back) = found  # what two groups change cancels, since their shares are 1 together
    assert (one, along) == pytest.approx((other, -back), rel=1e-8)


async def test_a_worker_starts_steps_publishes_saves_and_goes_on_from_there(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with local_ranks(tmp_path / "log", 1) as ranks:
        child = ranks[0]
        assert environment_of(child.pid)["OMP_WAIT_POLICY"] == "passive"
        trainer = TrainerProcess(ranks, timeout_s=120)
        with pytest.raises(TrainerError, match="refused Step: expected Start"):
            await trainer.step([(ROW,)])
        with pytest.raises(TrainerError, match=r"refused StartTrainer: .*nowhere"):
            await trainer.start(tmp_path / "nowhere", CONFIG, 1)

        await trainer.start(tiny_model_dir, CONFIG, 1)
        (first,), (sampled,) = [await trainer.logprobs([ROW.tokens], temperature=t) for t in (1.0, 0.5)]
        drawn = replace(ROW, logprobs=(0.0, *sampled))
        stats = await trainer.step([(drawn,), ()], version=0)
        assert stats.updates == 1
        assert stats.mismatch < 1e-5  # at the temperature of the rollouts
        assert stats.mismatch_fresh == stats.mismatch
        moved = await trainer.logprobs([ROW.tokens])
        assert sum(moved[0]) > sum(first)

        with pytest.raises(TrainerError, match="expected ids in"):
            await trainer.step([(Sample((1, 10**6), (0, 1), (0.0, -1.0), (-1, 0), (0.0, 1.0)),)])
        assert isinstance(answer_from(await child.call(b"\x01nonsense", 120)), TrainerFailed)
        with pytest.raises(TrainerError, match="cannot be written"):
            await trainer.save(tmp_path / "nowhere")

        assert await trainer.save(tmp_path) > 0
        assert await trainer.write_version(tmp_path / "published.safetensors") > 0
        published, saved = (load_file(tmp_path / f"{name}.safetensors") for name in ("published", "model"))
        assert published.keys() == saved.keys()
        later = tmp_path / "later"
        later.mkdir()
        await trainer.save(later, later=True)
        await trainer.step([(ROW,)])  # while the copies are written
        await trainer.finish_save(later)
        with pytest.raises(TrainerError, match="expected files that are being written, got none"):
            await trainer.finish_save(later)
        assert all(
            (later / f"{name}.safetensors").read_bytes() == (tmp_path / f"{name}.safetensors").read_bytes()
            for name in ("model", "optimizer")
        )
        before = (tmp_path / "before.safetensors", later / "published.safetensors")
        await trainer.write_version(before[0])
        await trainer.write_version(before[1], later=True)
        written = asyncio.create_task(trainer.finish_save(later))
        await trainer.step([(ROW,)])  # which changes the weights, and nothing of what was copied
        await written
        assert before[0].read_bytes() == before[1].read_bytes() != (tmp_path / "published.safetensors").read_bytes()
        assert await trainer.load(tmp_path) > 0
        assert await trainer.logprobs([ROW.tokens]) == moved

        child._writer.close()
        assert (await asyncio.wait_for(child.died(), 20)).returncode == 0


@pytest.mark.parametrize(
    "message",
    [
        StartTrainer("m", "{}", "{}"),
        Step(Packer(CONFIG.train, 1024, 16).step(((ROW, ROW), ()))[0]),
        ComputeLogprobs(((1, 2), (3,))),
        WriteVersion("a"),
        SaveCheckpoint("b", later=True),
        FinishSave("c"),
        FindRows("d", optimizer=False),
    ],
)
def test_requests_survive_the_wire(message: Request) -> None:
    assert request_from(wire.encode(message)) == message
