"""A run that cannot learn says so."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.run.learning import STEPS, Collapse, Learning
from shoal.trainer.advantage import turn_returns
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Task, Turn

EQUAL, DIFFERENT = (0.0, 0.0), (0.0, 1.0)


def step(*groups: Sequence[float]) -> list[Group]:
    """Groups of these rewards."""

    def rollout(i: int, n: int, reward: float) -> Rollout:
        return Rollout(f"{i}/{n}", (Message(Role.ASSISTANT, f"said {n}"),), (), Reward(reward))

    return [
        Group(f"g{i}", Task("t", "s", ()), tuple(rollout(i, n, reward) for n, reward in enumerate(rewards)), 0)
        for i, rewards in enumerate(groups)
    ]


def test_twenty_steps_without_a_difference_are_told_once_with_answers_and_with_what_to_set() -> None:
    learning = Learning(turn_returns, within_groups=True)
    told = [learning.stepped(step(EQUAL, EQUAL)) for _ in range(40)]
    assert [i for i, now in enumerate(told) if now] == [19]
    assert learning.warning.startswith("no group of the last 40 steps had differing rewards")
    assert "set tasks.params to easier questions" in learning.warning
    assert "'said 0' (reward 0)" in learning.warning


def test_a_warning_shows_the_beginning_of_a_long_answer() -> None:
    def warning(*answers: str) -> str:
        learning = Learning(turn_returns, within_groups=True)
        rollout = Rollout("r", tuple(Message(Role.ASSISTANT, answer) for answer in answers), (), Reward(0.0))
        learning.stepped([Group("g", Task("t", "s", ()), (rollout,), 0)])
        return learning.warning

    assert f"'{'a' * 80}' (reward 0)" in warning("a" * 80)
    assert f"'{'a' * 80}...' (reward 0)" in warning("a" * 81)
    assert "some answers: 'last' (reward 0)" in warning("first", "last")
    assert "some answers: '' (reward 0)" in warning()


def test_one_group_that_differs_begins_the_count_anew() -> None:
    learning = Learning(turn_returns, within_groups=True)
    for _ in range(30):
        learning.stepped(step(EQUAL, EQUAL))
    learning.stepped(step(EQUAL, DIFFERENT))
    assert learning.warning == ""
    assert not any(learning.stepped(step(EQUAL)) for _ in range(19))
    assert learning.warning == ""
    assert learning.stepped(step(EQUAL))
    assert learning.warning != ""


def test_a_short_run_of_which_no_step_taught_anything_is_warned_of_at_its_end() -> None:
    learning = Learning(turn_returns, within_groups=True)
    assert learning.warning == ""
    assert not learning.stepped(step(EQUAL))
    assert "last 1 steps" in learning.warning


def test_groups_that_are_compared_with_one_another_teach_when_they_differ_from_one_another() -> None:
    learning = Learning(turn_returns, within_groups=False)
    learning.stepped(step((0.0,), (1.0,)))
    assert learning.warning == ""
    learning = Learning(turn_returns, within_groups=True)
    learning.stepped(step((0.0,), (1.0,)))
    assert learning.warning != ""


def test_what_to_set_follows_from_the_answers_that_taught_nothing() -> None:
    right, cut = Learning(turn_returns, within_groups=True), Learning(turn_returns, within_groups=True)
    right.stepped(step((1.0, 1.0)))
    assert "harder questions" in right.warning
    turn = Turn((1,), Completion((2,), (-1.0,), (0,), FinishReason.LENGTH))
    rollouts = tuple(Rollout(f"r{i}", (), (turn,), Reward(0.0)) for i in range(2))
    cut.stepped([Group("g", Task("t", "s", ()), rollouts, 0)])
    assert "set rollout.max_tokens higher" in cut.warning
    half = Learning(turn_returns, within_groups=True)
    half.stepped([Group("g", Task("t", "s", ()), (rollouts[0], replace(rollouts[1], turns=())), 0)])
    assert "max_tokens" not in half.warning, "a half is not most"


def told_at(rewards: Sequence[float]) -> list[int]:
    """Steps, from 0, whose mean reward is told to have collapsed."""
    watcher = Collapse(lr=1e-4)
    return [i for i, reward in enumerate(rewards) if watcher.stepped(reward)]


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("base", [0.0, -5.0])
def test_a_reward_that_falls_far_below_its_best_is_told_once(scale: float, base: float) -> None:
    dice = random.Random(0)
    noise = [scale * (0.05 * dice.random()) for _ in range(200)]
    rewards = [base + scale * (0.8 if 30 < i < 100 else 0.1) + one for i, one in enumerate(noise)]
    (step,) = told_at([base, *rewards])
    assert 100 < step <= 100 + STEPS


@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), rows=st.sampled_from([4, 8, 64]))
def test_a_reward_that_only_varies_by_chance_is_not_told(seed: int, share: float, rows: int) -> None:
    dice = random.Random(seed)
    assert told_at([sum(dice.random() < share for _ in range(rows)) / rows for _ in range(150)]) == []
