"""Scorers of other hosts that answer wrongly, or fail at once, beside an honest one."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checker import Exact
from shoal.reward.remote import RemoteScorer
from shoal.types import Reward, RewardStatus, Task
from stub_server import Stub, stubbed

RIGHT: dict[str, Any] = {"value": 1.0, "status": "scored", "parts": [["exact", 1.0]], "evidence": ""}
values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})
rewards = st.lists(
    st.fixed_dictionaries({name: values | st.just(right) for name, right in RIGHT.items()}) | values, max_size=3
)


def scored(body: bytes) -> tuple[list[Reward], int]:
    """Rewards by a scorer that gives `body` and an honest one, and how often the first was asked in two questions."""

    async def run() -> tuple[list[Reward], int]:
        rogue, honest = Stub(otherwise=(200, body)), Stub(otherwise=(200, json.dumps({"rewards": [RIGHT]}).encode()))
        async with stubbed(rogue) as one, stubbed(honest) as other:
            scorer = RemoteScorer([one, other])
            for _ in range(2):
                found = await scorer.score_by(Exact(), Task("t", "s", (), "1"), ["1"])
            await scorer.aclose()
        return found, len(rogue.asked)

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
