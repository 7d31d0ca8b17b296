"""Scorers of other hosts that answer wrongly, or fail at once, beside an honest one.

`python tests/reward/test_rogue_scorer.py COUNT` asks for so many generated answers; the suite asks for few.
"""

import asyncio
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checker import Exact
from shoal.cluster.registry import RewardsRole
from shoal.reward.remote import RemoteScorer
from shoal.types import Reward, RewardStatus, Task

RIGHT: dict[str, Any] = {"value": 1.0, "status": "scored", "parts": [["exact", 1.0]], "evidence": ""}
values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})
rewards = st.lists(
    st.fixed_dictionaries({name: values | st.just(right) for name, right in RIGHT.items()}) | values, max_size=3
)


class Scorer:
    """A scorer that has joined, and gives one answer."""

    running = 0

    def __init__(self, name: str, answer: bytes) -> None:
        self.name, self.answer, self.asked = name, answer, 0

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        self.asked += 1
        return self.answer


def scored(body: bytes) -> tuple[list[Reward], int]:
    """Rewards by a scorer that gives `body` and an honest one, and how often the first was asked in two questions."""

    async def run() -> tuple[list[Reward], int]:
        rogue, honest = Scorer("rogue", body), Scorer("honest", json.dumps({"rewards": [RIGHT]}).encode())
        scorer = RemoteScorer()
        async with scorer.joined(RewardsRole(), rogue), scorer.joined(RewardsRole(), honest):
            for _ in range(2):
                found = await scorer.score_by(Exact(), Task("t", "s", (), "1"), ["1"])
        return found, rogue.asked

    return asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(rewards)
def test_whatever_a_rogue_scorer_answers_the_rewards_are_whole(given_rewards: object) -> None:
    (reward,), _ = scored(json.dumps({"rewards": given_rewards}).encode())
    assert reward.status is not RewardStatus.FAILED
    assert reward.status is RewardStatus.SCORED or reward.value == 0
    assert type(reward.value) is float


@pytest.mark.parametrize("wrong", [{"status": "failed", "value": 0.0}, {"status": "timed_out", "value": 3.0}])
def test_a_scorer_that_fails_at_once_rests_and_another_one_is_asked(wrong: dict[str, Any]) -> None:
    (reward,), asked = scored(json.dumps({"rewards": [RIGHT | wrong]}).encode())
    assert (reward.status, reward.value, asked) == (RewardStatus.SCORED, 1.0, 1)


def test_a_scorer_that_says_something_else_is_a_failure_and_not_a_score() -> None:
    class Babbler(Scorer):
        def __init__(self, name: str) -> None:
            super().__init__(name, b"")
            self.said = [b"<html>", b'{"rewards": []}', b'{"rewards": "\xff"}', b'{"rewards": [], "refused": "no"}']

        async def call(self, request: bytes, timeout_s: float) -> bytes:
            return self.said.pop(0)

    async def run() -> list[Reward]:
        scorer, only = RemoteScorer(), Babbler("only")
        async with scorer.joined(RewardsRole(), only):
            found = await scorer.score_by(Exact(), Task("t", "s", (), "1"), ["1"])
        assert only.said == []
        return found

    (reward,) = asyncio.run(run())
    assert (reward.status, reward.evidence) == (RewardStatus.FAILED, "only: no")


def test_a_scorer_that_joins_and_leaves_at_once_is_waited_for_as_if_it_had_never_come() -> None:
    async def run() -> list[Reward]:
        scorer, honest = RemoteScorer(), Scorer("honest", json.dumps({"rewards": [RIGHT]}).encode())
        asked = asyncio.create_task(scorer.score_by(Exact(), Task("t", "s", (), "1"), ["1"]))
        await asyncio.sleep(0)
        async with scorer.joined(RewardsRole(), Scorer("brief", b"")):
            pass
        await asyncio.sleep(0)
        async with scorer.joined(RewardsRole(), honest):
            return await asked

    assert [one.value for one in asyncio.run(run())] == [1.0]


if __name__ == "__main__":
    # The suite's test, many times over.
    given(rewards)(
        settings(max_examples=int(sys.argv[1]), deadline=None)(
            test_whatever_a_rogue_scorer_answers_the_rewards_are_whole.hypothesis.inner_test  # type: ignore[attr-defined]
        )
    )()
