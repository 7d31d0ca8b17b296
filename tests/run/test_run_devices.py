"""Every process of a run has a GPU of its own, unless the configuration says that two share one."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environ import environment_of
from shoal.config import Config, parse
from shoal.engine.pool.engine_pool import EnginePool
from shoal.errors import ConfigError
from shoal.rollout.single_turn import SingleTurn
from shoal.run.commands.plan import plan
from shoal.run.engines import RunEngines
from shoal.run.machine.devices import Devices, Threads, devices_of, visible_gpus
from shoal.run.training import train
from shoal.types import Task
from until import alive


def config(*overrides: str) -> Config:
    return parse({"tasks": [{"name": "gcd"}]}, overrides)


@given(engines=st.integers(1, 6), ranks=st.integers(1, 6), gpus=st.integers(1, 12))
def test_no_two_processes_share_a_gpu_that_nobody_asked_to_share(engines: int, ranks: int, gpus: int) -> None:
    asked = config(f"engine.count={engines}", f"train.ranks={ranks}")
    visible = [f"GPU-{i}" for i in range(gpus)]
    if engines + ranks > gpus:
        with pytest.raises(ConfigError, match="'shared' puts engines on the trainer's GPUs"):
            devices_of(asked, visible)
        return
    found = devices_of(asked, visible)
    assert (len(found.engines), len(found.ranks)) == (engines, ranks)
    assert len({*found.engines, *found.ranks}) == engines + ranks
    assert {*found.engines, *found.ranks} <= set(visible)


@pytest.mark.parametrize(
    ("overrides", "visible", "expected"),
    [
        ([], [], Devices()),
        (["model.device=cpu"], ["0"], Devices()),
        (["engine.gpus=shared"], ["0"], Devices(("0",), ("0",))),
        (["engine.gpus=shared"], [], Devices()),
        (["engine.gpus=shared", "engine.count=3", "train.ranks=2"], ["4", "6"], Devices(("4", "6", "4"), ("4", "6"))),
        (["engine.gpus=[1, 1]", "engine.count=2"], ["0", "1"], Devices(("1", "1"), ("0",))),
        (["engine.gpus=[0]"], ["0", "1"], Devices(("0",), ("1",))),
        (["train.gpus=[1]"], ["0", "1"], Devices(("0",), ("1",))),
        (["train.gpus=[0]", "engine.gpus=[0]"], ["7"], Devices(("7",), ("7",))),
        (['engine.urls=["http://127.0.0.1:1"]', "train.ranks=2"], ["0", "1"], Devices((), ("0", "1"))),
    ],
)
def test_gpus_that_are_named_or_shared_are_taken(
    overrides: Sequence[str], visible: Sequence[str], expected: Devices
) -> None:
    assert devices_of(config(*overrides), visible) == expected


@pytest.mark.parametrize(
    ("overrides", "visible", "complaint"),
    [
        (["model.device=cuda"], [], "model.device: expected a GPU that torch can use for 'cuda', got none"),
        (["engine.gpus=[0]"], [], "engine.gpus: expected none with no GPU that torch can use, got [0]"),
        (["train.gpus=[0]", "model.device=cpu"], ["0"], "train.gpus: expected none with model.device = 'cpu', got [0]"),
        (
            ["train.offload=optimizer"],
            [],
            "train.offload: expected 'none' without a GPU for the trainer, got 'optimizer'",
        ),
        (["engine.gpus=[2]"], ["0", "1"], "engine.gpus: expected numbers below 2, the GPUs there are, got [2]"),
        (["engine.gpus=[0, 1]"], ["0", "1"], "engine.gpus: expected a GPU for each engine, 1 in all, got [0, 1]"),
        (["train.gpus=[0, 0]", "train.ranks=2"], ["0"], "train.gpus: expected one GPU per rank"),
        ([], ["0"], "engine.gpus, train.gpus: expected a GPU for each of 1 engines and 1 ranks, got 1"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_with_the_setting(
    overrides: Sequence[str], visible: Sequence[str], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        devices_of(config(*overrides), visible)
    assert str(caught.value).startswith(complaint)


def test_an_evaluation_places_engines_alone() -> None:
    assert devices_of(config("train.gpus=[0, 1]"), ["3"], trains=False) == Devices(("3",), ())


def test_a_run_uses_those_gpus_only_that_it_was_given() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 8) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-ab, 3"}, 8) == ("GPU-ab", "3")
    assert visible_gpus({}, 2) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3"}, 0) == ()


def test_a_dry_run_places_the_trainer_as_well(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.gpus: expected none with model.device = 'cpu', got \[0\]"):
        plan(config("train.gpus=[0]", "model.device=cpu", f"run_dir={tmp_path / 'run'}"))


def test_each_engine_process_sees_its_own_gpu_and_no_other(tmp_path: Path) -> None:
    async def main() -> list[str]:
        started = config("engine.count=2", f"run_dir={tmp_path}")
        devices = Devices(("4", "GPU-9"))
        parts: Any = SimpleNamespace(
            config=started, model_dir=tmp_path, max_model_len=64, devices=devices, threads=Threads()
        )
        own = RunEngines(parts, EnginePool(), print)
        seen = []
        for name in ("engine-0", "engine-1"):
            async with own._child(name) as child:
                seen.append(environment_of(child.pid)["CUDA_VISIBLE_DEVICES"])
        return seen

    assert asyncio.run(main()) == ["4", "GPU-9"]


class Watched:
    """What `prepare` makes, as far as the trainer's start reads it; ends the run when the first engine is asked for."""

    devices, threads, scorer, single_turn = Devices(ranks=("GPU-7", "GPU-8")), Threads(), SimpleNamespace(), SingleTurn
    service = SimpleNamespace(notes=(), draw=lambda split, index: Task(f"{split} {index}", "gcd", ()))

    def __init__(self, settings: Config) -> None:
        self.config = settings
        self.seen: list[str] = []

    @property
    def model_dir(self) -> Path:
        for child in filter(lambda one: alive(one.pid), psutil.Process().children()):
            variables = environment_of(child.pid)  # before the command, which the kernel does not tell earlier
            if "shoal.trainer.worker" in child.cmdline():
                self.seen.append(variables["CUDA_VISIBLE_DEVICES"])
        raise ConfigError("enough was seen")


def test_the_trainer_of_a_run_is_started_with_the_gpus_of_its_ranks(tmp_path: Path) -> None:
    watched = Watched(config(f"run_dir={tmp_path / 'run'}", "train.ranks=2"))
    prepared: Any = watched
    with pytest.raises(ConfigError, match="enough was seen"):
        asyncio.run(train(prepared))
    assert sorted(watched.seen) == ["GPU-7", "GPU-8"]
