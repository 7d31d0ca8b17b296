"""Checkpoints come early in time, evaluations that cost more than training are told, and engines are looked at."""

import asyncio
from typing import Any

from shoal.config import parse
from shoal.experience.buffer import Buffer
from shoal.interfaces import EngineInfo
from shoal.rehearsal.clock import run_virtual
from shoal.run.checkpoints import EARLY_S, CheckpointDue
from shoal.run.engine_watch import EngineWatch
from shoal.run.loop import EvaluationCost
from shoal.run.run_dir import run_meta


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def saved_after(step_s: float, save_s: float, *, every_steps: int, steps: int) -> list[int]:
    """Steps, from 1, after which checkpoints were written."""
    clock, saved = Clock(), []
    due = CheckpointDue(every_steps, clock)
    for step in range(steps):
        clock.now_s += step_s
        if due.after(step):
            clock.now_s += save_s
            due.saved(save_s)
            saved.append(step + 1)
    return saved


def test_quick_steps_are_saved_by_their_number_and_slow_ones_by_the_time_too() -> None:
    assert saved_after(1.0, 0.1, every_steps=25, steps=100) == [25, 50, 75, 100]
    assert saved_after(EARLY_S, 0.1, every_steps=25, steps=4) == [1, 2, 3, 4]
    assert saved_after(42.0, 0.1, every_steps=25, steps=9) == [3, 6, 9]


def test_time_alone_makes_checkpoints_cost_a_twentieth_at_most() -> None:
    assert saved_after(60.0, 60.0, every_steps=1000, steps=62) == [2, 22, 42, 62]


def test_a_checkpoint_written_beside_training_costs_what_training_waited_for_it() -> None:
    clock = Clock()
    due = CheckpointDue(1000, clock)
    due.saved(5.0)
    clock.now_s = 600.0  # a step of 60 s, and 540 s until the write ended
    due.sealed(540.0)
    assert not due.after(0)
    clock.now_s = 20 * 545.0
    assert due.after(1)


def cost(evaluation_s: float, trained_s: float) -> list[str]:
    """What is told of three stretches of 20 steps between evaluations."""
    clock = Clock()
    watch = EvaluationCost(questions=128, clock=clock)
    clock.now_s = 1000.0
    watch.begin()
    watch.evaluation_s = evaluation_s
    told = []
    for _ in range(3):
        clock.now_s += trained_s
        told.append(watch.trained(20))
    return told


def test_an_evaluation_that_takes_longer_than_training_is_told_once_with_what_to_set() -> None:
    first, *later = cost(90.0, 30.0)
    assert first.startswith("an evaluation takes 90 s, more than the 30 s of the 20 steps between two; ")
    assert "set eval.questions to 10, or eval.every_steps above 80" in first
    assert later == ["", ""]
    assert cost(30.0, 90.0) == ["", "", ""]


class Fed:
    """An engine that is busier at each look; the gate is full at the first one, and has room later."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.looks = buffer, 0

    async def info(self) -> EngineInfo:
        self.looks += 1
        if self.looks == 1:
            await self.buffer.admit("g0", "gcd")
        self.buffer.gate.on_loaded(self.looks // 2)
        return EngineInfo(0, "", 64, self.looks / 8, 0, 0, 0, 1, 0)


def test_shares_of_a_step_are_means_over_its_looks() -> None:
    config = parse({"tasks": [{"name": "gcd"}], "train": {"groups_per_step": 1}, "asynchrony": {"max_staleness": 0}})

    async def main() -> list[tuple[float, float]]:
        buffer, shares = Buffer.in_memory(run_meta(config), max_running=1), []
        engine: Any = Fed(buffer)
        watch = EngineWatch(engine, buffer, config.engine, poll_s=1.0)
        looking = asyncio.create_task(watch.run())
        for seconds in (3.5, 2.0):
            await asyncio.sleep(seconds)
            shares.append((watch.busy_share, watch.held_back_share))
            watch.clear()
        looking.cancel()
        await buffer.close()
        return shares

    assert run_virtual(main()) == [(0.3125, 0.25), (0.6875, 0.0)]  # looks 1 to 4, and 5 and 6
