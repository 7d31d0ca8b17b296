"""A rehearsal runs the real control code on a virtual clock: equal by seed, and equal to closed forms."""

import random
from dataclasses import replace

import pytest

from shoal.config import Config
from shoal.rehearsal.costs import EngineCost, TrainerCost
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import Rehearsed, Scene, Spot


def scene(
    *, steps: int = 12, groups: int = 4, size: int = 2, max_staleness: int = 2, tokens: int = 100, train_s: float = 10.0
) -> Scene:
    """Two engines of eight places, each of 0.1 s per token, and a trainer of fixed seconds."""
    config = Config.model_validate(
        {
            "tasks": [{"name": "sums"}],
            "train": {"steps": steps, "groups_per_step": groups},
            "rollout": {"group_size": size, "max_tokens": 2 * tokens},
            "engine": {"max_running": 8, "count": 2},
            "asynchrony": {"max_staleness": max_staleness},
            "eval": {"every_steps": 0, "questions": 1},
        }
    )
    return Scene(config, EngineCost(0.1, places=8), 2, TrainerCost(train_s, 0.0), lambda rng: tokens, tokens, 0)


def step_seconds(rehearsed: Rehearsed) -> list[float]:
    return [float(one["step_s"] or 0) for one in rehearsed.steps]


def test_equal_scenes_give_equal_records() -> None:
    varied = replace(scene(), length=lambda rng: rng.randint(20, 180), spot=Spot(60.0, 20.0))
    first, second = rehearse(varied), rehearse(varied)
    assert first.records == second.records
    assert first.interruptions == second.interruptions > 0
    assert rehearse(replace(varied, config=varied.config.model_copy(update={"seed": 1}))).records != first.records


def test_a_synchronous_run_takes_the_sum_of_its_sides() -> None:
    seconds = step_seconds(rehearse(scene(max_staleness=0)))
    assert seconds[1:-1] == pytest.approx([10.0 + 10.0] * len(seconds[1:-1]), rel=0.01)


def test_an_asynchronous_run_takes_its_slower_side() -> None:
    slow_trainer = step_seconds(rehearse(scene(train_s=30.0)))
    assert slow_trainer[3:] == pytest.approx([30.0] * len(slow_trainer[3:]), rel=0.01)


def test_answers_go_on_elsewhere_when_a_spot_machine_leaves_with_notice() -> None:
    random.seed(0)
    calm = rehearse(scene(steps=20))
    left, lost = (rehearse(replace(scene(steps=20), spot=Spot(40.0, 5.0, notice))) for notice in (True, False))
    assert left.interruptions > 5
    assert lost.interruptions > 5
    assert len(calm.steps) == len(left.steps) == len(lost.steps) == 20
    assert left.sampled_tokens < 1.1 * calm.sampled_tokens
    assert calm.seconds < left.seconds < lost.seconds
