"""First failures for one reason end a run; any other ending leaves them to those who count failures."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TaskError
from shoal.interfaces import Purpose
from shoal.rollout.evaluation import evaluation
from shoal.rollout.first_failures import ALIKE, ROLLOUTS, FirstFailures
from shoal.types import Reward, RewardStatus, Rollout, RolloutStatus, Task


def rollouts(*reasons: str) -> tuple[Rollout, ...]:
    """Rollouts that failed for these reasons; one without a reason finished."""
    return tuple(
        Rollout(f"r{i}", (), (), Reward(0.0, RewardStatus.FAILED), RolloutStatus.FAILED, reason)
        if reason
        else Rollout(f"r{i}", (), (), Reward(1.0))
        for i, reason in enumerate(reasons)
    )


def ends(groups: Sequence[Sequence[str]]) -> str:
    """The sentence with which groups of these endings end a run; empty when they do not."""
    watch = FirstFailures("groups")
    try:
        for one in groups:
            watch.ended(watch.started(), rollouts(*one))
    except TaskError as error:
        return str(error)
    return ""


@given(
    st.lists(st.lists(st.sampled_from(["no tool 1", "no tool 2", "", "other"]), min_size=1, max_size=8), max_size=12)
)
def test_only_first_groups_that_all_fail_for_one_reason_end_a_run(groups: list[list[str]]) -> None:
    alike = list(takewhile(lambda one: {reason.rstrip("12 ") for reason in one} == {"no tool"}, groups))
    other = list(takewhile(lambda one: set(one) == {"other"}, groups))
    assert bool(ends(groups)) == any(len(one) >= ALIKE and sum(map(len, one)) >= ROLLOUTS for one in (alike, other))


def test_a_reason_is_the_same_whatever_numbers_and_addresses_it_has() -> None:
    said = ends([[f"port {4000 + i}: process {i} at 0x{i:x}fe ended"] * 8 for i in range(ALIKE)])
    assert "32 failures of the first 4 groups, all for one reason: port 4003: process 3 at 0x3fe ended" in said
    assert "--resume" in said


class Broken:
    """Implements `interfaces.Runner`: each rollout fails, and the test counts them."""

    asked = 0

    async def rollouts(self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
        self.asked += 1
        await asyncio.sleep(0 if self.asked <= ROLLOUTS else 3600)
        return rollouts("agent: no such command")


def test_the_first_evaluation_ends_with_the_reason_before_all_questions_are_answered() -> None:
    runner, tasks = Broken(), [Task(f"t{i}", "s", ()) for i in range(64)]
    with pytest.raises(TaskError) as raised:
        asyncio.run(evaluation(tasks, runner, first=True))
    assert "first 16 held-out questions, all for one reason: agent: no such command" in str(raised.value)


def test_quick_failures_of_later_questions_do_not_overtake_a_slow_first_answer() -> None:
    watch = FirstFailures("groups")
    slow, *quick = (watch.started() for _ in range(1 + 2 * ROLLOUTS))
    for place in quick:
        watch.ended(place, rollouts("no image"))
    watch.ended(slow, rollouts(""))
    watch.ended(watch.started(), rollouts("no image"))
    other = FirstFailures("groups")
    slow, *quick = (other.started() for _ in range(ROLLOUTS))
    for place in quick:
        other.ended(place, rollouts("no image"))
    with pytest.raises(TaskError, match="16 failures of the first 16 groups"):
        other.ended(slow, rollouts("no image"))
