"""The trainer process, driven over its real socket."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shoal import wire
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.net.process import Child, torch_environment
from shoal.trainer.messages import (
    Answer,
    ComputeLogprobs,
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
    request_from,
)
from shoal.types import Sample

ROW = Sample((1, 2, 3), (0, 1, 1), (0.0, -4.0, -5.0), (-1, 0, 0), (0.0, 1.0, 1.0))


async def ask(child: Child, request: Request) -> Answer:
    return answer_from(await child.ask(wire.encode(request), 120))


def start(model: Path) -> StartTrainer:
    return StartTrainer(str(model), ModelConfig(device="cpu").model_dump_json(), TrainConfig(lr=1e-2).model_dump_json())


def test_a_worker_starts_steps_publishes_saves_and_goes_on_from_there(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with Child("trainer", "shoal.trainer.worker", [], tmp_path / "log", torch_environment(1)) as child:
            early = await ask(child, Step(((ROW,),)))
            assert isinstance(early, TrainerFailed)
            assert "expected Start" in early.reason

            missing = await ask(child, start(tmp_path / "nowhere"))
            assert isinstance(missing, TrainerFailed)
            assert "nowhere" in missing.reason

            started = await ask(child, start(tiny_model_dir))
            assert isinstance(started, Done)

            first = await ask(child, ComputeLogprobs(((1, 2, 3),)))
            assert isinstance(first, Done)
            assert isinstance(first.value, tuple)
            stepped = await ask(child, Step(((ROW,), ())))
            assert isinstance(stepped, Done)
            assert isinstance(stepped.value, StepStats)
            assert stepped.value.updates == 1
            moved = await ask(child, ComputeLogprobs(((1, 2, 3),)))
            assert isinstance(moved, Done)
            assert isinstance(moved.value, tuple)
            assert sum(moved.value[0]) > sum(first.value[0])

            refused = await ask(child, Step(((Sample((1, 10**6), (0, 1), (0.0, -1.0), (-1, 0), (0.0, 1.0)),),)))
            assert isinstance(refused, TrainerFailed)
            assert "expected ids in" in refused.reason
            nonsense = answer_from(await child.ask(b"\x01nonsense", 120))
            assert isinstance(nonsense, TrainerFailed)
            lost = await ask(child, SaveCheckpoint(str(tmp_path / "nowhere")))
            assert isinstance(lost, TrainerFailed)

            assert isinstance(await ask(child, SaveCheckpoint(str(tmp_path))), Done)
            assert isinstance(await ask(child, WriteVersion(str(tmp_path / "published.safetensors"))), Done)
            published, saved = (load_file(tmp_path / f"{name}.safetensors") for name in ("published", "model"))
            assert published.keys() == saved.keys()
            await ask(child, Step(((ROW,),)))
            assert isinstance(await ask(child, LoadCheckpoint(str(tmp_path))), Done)
            assert await ask(child, ComputeLogprobs(((1, 2, 3),))) == moved

            child._writer.close()
            assert (await asyncio.wait_for(child.died(), 20)).returncode == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "message",
    [
        start(Path("m")),
        Step(((ROW, ROW), ())),
        ComputeLogprobs(((1, 2), (3,))),
        WriteVersion("a"),
        SaveCheckpoint("b"),
    ],
)
def test_requests_survive_the_wire(message: Request) -> None:
    assert request_from(wire.encode(message)) == message
