"""What becomes of a group between the scorer and the log, and how many groups run at once."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_values import group as made_group
from shoal.errors import ConfigError
from shoal.rollout.concurrency import Concurrency
from shoal.rollout.reward_hooks import BEFORE, DUPLICATE, hooks_of, processed
from shoal.types import Group, RolloutStatus


def group() -> Group:
    return made_group("g", (0, 0), size=4)


def doubled(one: Group) -> Group:
    """A hook of a user's own."""
    raise ValueError("no")


def test_a_length_penalty_takes_off_what_was_drawn_and_keeps_the_score() -> None:
    before = group()
    after = asyncio.run(processed(before, hooks_of("t", ["correct", "length:0.01"])))
    for old, new in zip(before.rollouts, after.rollouts, strict=True):
        assert new.reward.value == pytest.approx(old.reward.value - 0.01 * old.sampled_tokens)
        assert dict(new.reward.parts)[BEFORE] == old.reward.value
        assert new.turns == old.turns


def test_of_equal_answers_the_first_is_trained_with() -> None:
    after = asyncio.run(processed(group(), hooks_of("t", "dedup")))
    said = [rollout.messages[-1].content for rollout in after.rollouts]
    kept = [one.messages[-1].content for one in after.finished]
    assert len(set(said)) == len(kept) == len(set(kept))
    assert {one.reason for one in after.rollouts if one.status is RolloutStatus.FAILED} <= {DUPLICATE}


def test_a_hook_of_the_user_s_that_raises_fails_the_group_with_its_reason() -> None:
    after = asyncio.run(processed(group(), hooks_of("t", "test_reward_hooks:doubled")))
    assert not after.finished
    assert after.rollouts[0].reason.startswith("post-processing: ValueError: no (test_reward_hooks.py:")


def test_a_hook_that_returns_no_group_fails_the_group_with_what_it_returned() -> None:
    after = asyncio.run(processed(group(), [lambda one: None]))  # type: ignore[arg-type, return-value]
    assert not after.finished
    assert "expected the group from the hook, got None" in after.rollouts[0].reason


def test_a_hook_that_blocks_holds_up_no_other_task() -> None:
    asked = threading.Event()

    def blocks(one: Group) -> Group:
        assert asked.wait(30), "the event loop has waited for the hook"
        return one

    async def main() -> None:
        running = asyncio.create_task(processed(group(), [blocks]))
        await asyncio.sleep(0)
        await asyncio.to_thread(asked.set)
        assert (await running).finished

    asyncio.run(main())


@pytest.mark.parametrize("word", ["unknown", "length:much", "nowhere:f", "math:nothing"])
def test_a_hook_that_is_none_is_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.sums\.reward"):
        hooks_of("sums", [word])


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 500), st.integers(0, 400)), max_size=60))
def test_concurrency_stays_within_its_bounds_and_grows_only_when_the_engine_idles(seen) -> None:
    one = Concurrency(10, 200)
    for running, waiting, groups in seen:
        before = one.limit
        after = one.looked(places=64, running=running, waiting=waiting, groups=groups)
        assert 10 <= after <= 200
        if after > before:
            assert (waiting, running < 0.6 * 64, groups >= before) == (0, True, True)
        if after < before:
            assert waiting > 64


def test_agents_that_mostly_wait_for_tools_fill_the_engine() -> None:
    """Each group has a request at the engine a tenth of its time."""
    one = Concurrency(10, 1000)
    for _ in range(40):
        one.looked(places=64, running=min(64, one.limit // 10), waiting=max(0, one.limit // 10 - 64), groups=one.limit)
    assert 380 <= one.limit <= 1000
