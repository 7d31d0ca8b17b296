"""Rewards of turns: what each turn led to, what it is compared with, and which row it trains in."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.token_rows import linked
from shoal.config import parse
from shoal.errors import ConfigError
from shoal.trainer.advantage import STD_EPS, batch_advantages, rows, step_samples, turn_advantages, turn_returns
from shoal.types import Completion, FinishReason, Group, Reward, Rollout, RolloutStatus, Task, Turn

REWARDS = st.floats(-2, 2, width=32)
PLAYED = st.tuples(st.lists(REWARDS, min_size=1, max_size=5), REWARDS)  # of the turns, and of the whole


def rollout(name: str, turn_rewards: list[float], reward: float) -> Rollout:
    """A conversation of one token per turn."""
    turns = []
    for i, earned in enumerate(turn_rewards):
        drawn = Completion((10 + i,), (-0.5,), (0,), FinishReason.STOP)
        turns.append(Turn((2,), drawn, earned, i - 1) if i else Turn((1,), drawn, earned))
    return Rollout(name, (), tuple(turns), Reward(reward))


def group(played: list[tuple[list[float], float]]) -> Group:
    """A group of such conversations."""
    return Group("g", Task("t", "s", ()), tuple(rollout(str(i), *one) for i, one in enumerate(played)), 0)


def reference(played: list[tuple[list[float], float]], discount: float) -> list[list[float]]:
    """Advantages of kind "grpo" in float64, written from the definition in docs/reference/algorithms.md."""
    returns = []
    for turn_rewards, reward in played:
        earned = np.array(turn_rewards, dtype=np.float64)
        earned[-1] += reward
        powers = discount ** np.arange(len(earned), dtype=np.float64)
        returns.append([float(earned[t:] @ powers[: len(earned) - t]) for t in range(len(earned))])
    result: list[list[float]] = [[] for _ in played]
    for t in range(max(map(len, returns))):
        column = np.array([one[min(t, len(one) - 1)] for one in returns], dtype=np.float64)
        for i, one in enumerate(returns):
            if t < len(one):
                spread = column.std(ddof=1) if len(column) > 1 else 0.0
                result[i].append(float((column[i] - column.mean()) / (spread + STD_EPS)) if spread > 1e-12 else 0.0)
    return result


@settings(max_examples=150, deadline=None)
@given(played=st.lists(PLAYED, min_size=1, max_size=5), discount=st.sampled_from([1.0, 0.9, 0.5]))
def test_the_advantage_of_every_turn_is_that_of_the_definition(
    played: list[tuple[list[float], float]], discount: float
) -> None:
    returns = [[turn_returns(one, discount) for one in group(played).rollouts]]
    (computed,) = turn_advantages(returns, "grpo")
    for ours, theirs in zip(computed, reference(played, discount), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(played=st.lists(PLAYED, min_size=2, max_size=5))
def test_without_rewards_of_turns_and_discount_each_turn_has_its_rollouts_advantage(
    played: list[tuple[list[float], float]],
) -> None:
    plain = [([0.0] * len(turns), reward) for turns, reward in played]
    (computed,) = turn_advantages([[turn_returns(one) for one in group(plain).rollouts]], "grpo")
    (expected,) = batch_advantages([[reward for _, reward in plain]], "grpo")
    assert [set(values) for values in computed] == [{value} for value in expected]


def test_a_reward_counts_less_for_the_turns_before_it() -> None:
    assert turn_returns(rollout("r", [0.0, 0.0, 0.0], 1.0), discount=0.5) == [0.25, 0.5, 1.0]


def test_a_turn_reward_counts_for_no_later_turn() -> None:
    assert turn_returns(rollout("r", [1.0, 0.0], 0.0)) == [1.0, 0.0]


def test_every_turn_is_trained_with_its_own_advantage() -> None:
    config = parse({"tasks": [{"name": "t"}], "train": {"turn_discount": 0.5, "advantage": "grpo_no_std"}}).train
    ((long, short),) = step_samples([group([([0.0, 0.0], 1.0), ([0.0], 0.0)])], config, max_tokens=8)
    assert [a for m, a in zip(long.mask, long.advantages, strict=True) if m] == [0.25, 0.5]
    assert [a for m, a in zip(short.mask, short.advantages, strict=True) if m] == [-0.25]


def test_a_truncated_rollout_is_trained_and_a_failed_one_is_not() -> None:
    ends = (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED, RolloutStatus.FAILED)
    turns = (Turn((1,), Completion((5,), (-1.0,), (0,), FinishReason.STOP)),)
    rollouts = tuple(Rollout(end.value, (), turns, Reward(float(i)), end) for i, end in enumerate(ends))
    assert [one.id for one in Group("g", Task("t", "s", ()), rollouts, 0).finished] == ["finished", "truncated"]


def test_turns_of_two_conversations_begun_by_turns_give_a_row_each() -> None:
    def turn(prompt: tuple[int, ...], token: int) -> Turn:
        return Turn(prompt, Completion((token,), (-1.0,), (0,), FinishReason.STOP))

    turns = (turn((1,), 5), turn((2,), 6), turn((1, 5, 3), 7), turn((2, 6, 3), 8), turn((1, 5, 4), 9))
    main, other, branch = rows(Rollout("r", (), linked(*turns), Reward(1.0)), [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (main.tokens, main.mask) == ((1, 5, 3, 7), (0, 1, 0, 1))
    assert (other.tokens, other.mask) == ((2, 6, 3, 8), (0, 1, 0, 1))
    assert (branch.tokens, branch.mask) == ((1, 5, 4, 9), (0, 0, 0, 1))
    assert main.advantages == (0.0, 1.0, 0.0, 3.0)
    assert branch.advantages == (0.0, 0.0, 0.0, 5.0)


def test_a_turn_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="turn reward"):
        Turn((1,), Completion((), (), (), FinishReason.STOP), math.nan)


def test_a_critic_takes_no_discount() -> None:
    with pytest.raises(ConfigError, match=r"train\.turn_discount"):
        parse({"tasks": [{"name": "t"}], "train": {"turn_discount": 0.5, "advantage": "gae"}})
