"""A run that cannot learn says so."""

from collections.abc import Sequence

from shoal.run.result import Learning
from shoal.trainer.advantage import turn_returns
from shoal.types import Group, Message, Reward, Role, Rollout, Task

EQUAL, DIFFERENT = (0.0, 0.0), (0.0, 1.0)


def step(*groups: Sequence[float]) -> list[Group]:
    """Groups of these rewards."""

    def rollout(i: int, n: int, reward: float) -> Rollout:
        return Rollout(f"{i}/{n}", (Message(Role.ASSISTANT, f"said {n}"),), (), Reward(reward))

    return [
        Group(f"g{i}", Task("t", "s", ()), tuple(rollout(i, n, reward) for n, reward in enumerate(rewards)), 0)
        for i, rewards in enumerate(groups)
    ]


def test_twenty_steps_without_a_difference_are_told_with_answers_and_again_after_twenty_more() -> None:
    learning = Learning(turn_returns, within_groups=True)
    told = [learning.stepped(step(EQUAL, EQUAL)) for _ in range(40)]
    assert [i for i, now in enumerate(told) if now] == [19, 39]
    assert learning.warning.startswith("no group of the last 40 steps had differing rewards")
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
