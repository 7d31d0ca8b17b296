"""Rewards to advantages, rollouts to rows."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import losses, token_rows
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.trainer.advantage import (
    STD_EPS,
    Kind,
    advantages,
    batch_advantages,
    is_informative,
    mask_tokens,
    overlong_penalty,
    own_advantage,
    returns_of,
    rows,
    step_samples,
)
from shoal.turn_tree import prompt_ids
from shoal.types import Completion, FinishReason, Group, Reward, Rollout, RolloutStatus, Sample, Task, Turn

KINDS: tuple[Kind, ...] = ("grpo", "grpo_no_std", "rloo")
rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=9).filter(lambda x: max(x) - min(x) > 1e-3)


def turn(prompt: tuple[int, ...], drawn: tuple[int, ...], version: int = 0) -> Turn:
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(drawn)))
    return Turn(prompt, Completion(drawn, logprobs, (version,) * len(drawn), FinishReason.STOP))


def rollout(reward: float, *turns: Turn, failed: bool = False) -> Rollout:
    status = RolloutStatus.FAILED if failed else RolloutStatus.FINISHED
    return Rollout(id="r", messages=(), turns=turns, reward=Reward(reward), status=status)


def group(*rollouts: Rollout) -> Group:
    return Group(id="g", task=Task("t", "s", ()), rollouts=rollouts, admitted_version=0)


@given(rewards)
def test_grpo_divides_the_distance_from_the_mean_by_the_standard_deviation(values: list[float]) -> None:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    assert advantages(values, "grpo") == pytest.approx([(r - mean) / (std + STD_EPS) for r in values], abs=1e-9)


@given(rewards)
def test_grpo_no_std_is_the_distance_from_the_mean(values: list[float]) -> None:
    mean = statistics.fmean(values)
    assert advantages(values, "grpo_no_std") == pytest.approx([r - mean for r in values], abs=1e-12)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=16))
def test_maxrl_is_the_mean_score_of_right_answers_less_that_of_all(rewards: list[int]) -> None:
    assert advantages(rewards, "maxrl") == pytest.approx(losses.maxrl(rewards))


def test_maxrl_refuses_rewards_below_0() -> None:
    with pytest.raises(ConfigError, match="'maxrl' expected rewards of 0 and 1, got -1"):
        advantages([1.0, -1.0], "maxrl")


@given(rewards)
def test_rloo_is_the_distance_from_the_mean_of_the_others(values: list[float]) -> None:
    others = [statistics.fmean(values[:i] + values[i + 1 :]) for i in range(len(values))]
    assert advantages(values, "rloo") == pytest.approx([r - o for r, o in zip(values, others, strict=True)], abs=1e-9)


uneven = st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=4)


@given(uneven)
def test_batch_advantages_are_normalised_over_the_rollouts_of_all_groups(values: list[list[float]]) -> None:
    got = batch_advantages(values, "batch")
    flat = [reward for group in values for reward in group]
    if len(flat) < 2 or min(flat) == max(flat):
        assert got == [[0.0] * len(group) for group in values]
        return
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    for group, of_group in zip(values, got, strict=True):
        assert of_group == pytest.approx([(r - mean) / (std + STD_EPS) for r in group], rel=1e-6, abs=1e-6)


@given(uneven)
def test_group_batch_advantages_have_the_baseline_of_their_group_and_the_scale_of_the_batch(
    values: list[list[float]],
) -> None:
    got = batch_advantages(values, "group_batch")
    centred = [
        [r - statistics.fmean(group) for r in group] if len(group) > 1 else [0.0] * len(group) for group in values
    ]
    flat = [value for group in centred for value in group]
    if max(map(abs, flat), default=0.0) > 1e-6:
        std = math.sqrt(sum(x * x for x in flat) / (len(flat) - 1))
        for of_group, wanted in zip(got, centred, strict=True):
            assert of_group == pytest.approx([x / (std + STD_EPS) for x in wanted], rel=1e-5, abs=1e-5)


def test_a_critic_is_given_the_rewards_as_they_are() -> None:
    assert batch_advantages([[1.0, 0.0], [0.5]], "gae") == [[1.0, 0.0], [0.5]]


def halved(rewards: list[list[float]]) -> list[list[float]]:
    """A user's own advantage."""
    return [[reward / 2 for reward in group] for group in rewards]


def test_a_name_of_a_function_is_the_user_s_own_advantage() -> None:
    assert batch_advantages([[1.0, 0.0], [0.5]], f"{__name__}:halved") == [[0.5, 0.0], [0.25]]


def one(rewards: list[list[float]]) -> list[list[float]]:
    return [[1.0]]


def not_a_number(rewards: list[list[float]]) -> list[list[float]]:
    return [[math.nan] * len(group) for group in rewards]


def raises(rewards: list[list[float]]) -> list[list[float]]:
    return [[1 // 0] for _ in rewards]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("one", "expected one number for each"), ("not_a_number", "expected finite"), ("raises", "ZeroDivisionError")],
)
def test_an_advantage_that_cannot_be_trained_with_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        own_advantage(f"{__name__}:{name}")


@given(uneven, st.sampled_from(KINDS))
def test_groups_of_any_sizes_are_compared_within_themselves(values: list[list[float]], kind: Kind) -> None:
    assert batch_advantages(values, kind) == [advantages(group, kind) for group in values]


@given(st.integers(0, 60), st.integers(1, 29))
def test_overlong_answers_lose_up_to_1_over_the_last_tokens_of_the_budget(tokens: int, soft: int) -> None:
    """DAPO Eq. 13, as printed: L_max = 30, L_cache = soft."""
    if tokens <= 30 - soft:
        wanted = 0.0
    elif tokens <= 30:
        wanted = ((30 - soft) - tokens) / soft
    else:
        wanted = -1.0
    assert overlong_penalty(tokens, 30, soft) == pytest.approx(wanted)


def test_overlong_answers_are_shaped_before_the_baseline() -> None:
    short, full = rollout(1.0, turn((1,), (2, 3))), rollout(1.0, turn((1,), (2, 3, 4, 5)))
    config = TrainConfig(overlong_tokens=2, advantage="grpo_no_std")
    ((first, second),) = step_samples([group(short, full)], config, max_tokens=4)
    assert (first.advantages[-1], second.advantages[-1]) == (0.5, -0.5)
    ((first, second),) = step_samples([group(short, full)], TrainConfig(), max_tokens=4)
    assert (first.advantages[-1], second.advantages[-1]) == (0.0, 0.0)


def test_a_group_with_failed_rollouts_is_filled_up_with_finished_ones_whose_baseline_counts_each_once() -> None:
    good, bad = rollout(1.0, turn((1,), (2,))), rollout(0.0, turn((1,), (3,)))
    fine, failed = rollout(0.5, turn((1,), (4,))), rollout(9.0, turn((1,), (5,)), failed=True)
    config = TrainConfig(advantage="grpo_no_std")
    (padded,) = step_samples([group(good, failed, bad, fine, failed)], config, max_tokens=4)
    assert [(row.tokens[-1], row.advantages[-1]) for row in padded] == [
        (2, 0.5),
        (3, -0.5),
        (4, 0.0),
        (2, 0.5),
        (3, -0.5),
    ]
    (kept,) = step_samples(
        [group(good, failed, bad, fine, failed)], config.model_copy(update={"short_groups": "keep"}), 4
    )
    assert kept == padded[:3]
    assert step_samples([group(failed)], config, max_tokens=4) == [()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 3, [0.8] * 3])
def test_rewards_that_compare_nothing_give_exactly_zero(kind: Kind, values: list[float]) -> None:
    assert advantages(values, kind) == [0.0] * len(values)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_rollouts_enter_neither_baseline_nor_rows(kind: Kind) -> None:
    good, bad = rollout(1.0, turn((1,), (2,))), rollout(0.0, turn((1,), (3,)))
    failed = rollout(-100.0, turn((1,), (4,)), failed=True)
    found, wanted = step_samples(
        [group(good, failed, bad), group(good, bad)], TrainConfig(advantage=kind, short_groups="keep"), 4
    )
    assert found == wanted
    assert all(4 not in row.tokens for row in found)


def test_a_group_with_one_finished_rollout_gives_rows_without_advantage() -> None:
    alone = group(rollout(1.0, turn((1,), (2, 3))), rollout(0.0, turn((1,), (4,)), failed=True))
    ((row,),) = step_samples([alone], TrainConfig(advantage="grpo", short_groups="keep"), 4)
    assert row.advantages == (0.0, 0.0, 0.0)
    assert row.mask == (0, 1, 1)
    assert not is_informative(alone)


def test_a_group_is_informative_when_finished_rewards_differ() -> None:
    assert is_informative(group(rollout(1.0), rollout(0.0)))
    assert not is_informative(group(rollout(1.0), rollout(1.0)))
    assert not is_informative(group(rollout(1.0), rollout(0.0, failed=True)))


def test_a_group_whose_answers_differ_in_being_too_long_only_is_informative() -> None:
    answers = group(rollout(1.0), rollout(1.0, turn((1,), (5,) * 9)))
    assert not is_informative(answers)
    assert is_informative(answers, returns_of(TrainConfig(overlong_tokens=4), max_tokens=10))


def test_a_turn_that_extends_the_conversation_extends_the_row() -> None:
    later = replace(turn((9, 9), (6,), version=7), parent=0)
    (row,) = rows(rollout(1.0, turn((1, 2), (3, 4), version=5), later), 0.5)
    assert row == Sample(
        tokens=(1, 2, 3, 4, 9, 9, 6),
        mask=(0, 0, 1, 1, 0, 0, 1),
        logprobs=(0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.1),
        versions=(-1, -1, 5, 5, -1, -1, 7),
        advantages=(0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5),
    )


def test_a_turn_whose_prompt_was_rewritten_opens_a_new_row() -> None:
    first, second = rows(rollout(1.0, turn((1, 2), (3, 4)), turn((1, 2, 3, 8, 9), (6,))), 1.0)
    assert first.tokens == (1, 2, 3, 4)
    assert second.tokens == (1, 2, 3, 8, 9, 6)
    assert second.mask == (0, 0, 0, 0, 0, 1)


def test_turns_without_sampled_tokens_give_nothing_and_an_empty_prompt_is_refused() -> None:
    assert rows(rollout(1.0, turn((1, 2), ())), 1.0) == []
    with pytest.raises(ValueError, match="prompt of at least one token"):
        rows(rollout(1.0, turn((), (1,))), 1.0)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns whose prompts extend what came before, or edit or forget it; drawn tokens are numbered from 100."""
    context: tuple[int, ...] = ()
    turns, number = [], 100
    for _ in range(draw(st.integers(1, 5))):
        kept = context[: draw(st.sampled_from([len(context), len(context) - 1, 1]))] if context else ()
        prompt = kept + tuple(draw(st.lists(st.integers(1, 9), min_size=0 if kept else 1, max_size=3)))
        drawn = tuple(range(number, number + draw(st.integers(0, 3))))
        number += len(drawn)
        turns.append(turn(prompt, drawn))
        context = prompt + drawn
    return tuple(turns)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns that go on from any earlier turn or begin anew; sampled tokens are numbered from 100."""
    turns: list[Turn] = []
    number = 100
    for i in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *range(i)]))
        rendered = tuple(draw(st.lists(st.integers(1, 9), min_size=parent is None, max_size=3)))
        sampled = tuple(range(number, number + draw(st.integers(0, 3))))
        number += len(sampled)
        turns.append(replace(turn(rendered, sampled, version=i), parent=parent))
    return tuple(turns)


@given(trees())
def test_the_rows_of_a_tree_are_those_that_comparing_prompts_would_find(turns: tuple[Turn, ...]) -> None:
    values = [float(i) for i in range(len(turns))]
    prompts = [prompt_ids(turns, i) for i in range(len(turns))]
    found = token_rows.rows(prompts, [one.completion for one in turns], values)
    assert rows(rollout(1.0, *turns), values) == found
    assert rows(rollout(1.0, *token_rows.linked(*map(Turn, prompts, (t.completion for t in turns)))), values) == found


@given(trees())
def test_what_came_after_an_ancestor_follows_the_ancestor_s_tokens(turns: tuple[Turn, ...]) -> None:
    for i, one in enumerate(turns):
        before, whole = one.parent, prompt_ids(turns, i)
        while before is not None:
            known = prompt_ids(turns, before) + turns[before].completion.token_ids
            assert known + prompt_ids(turns, i, before) == whole
            before = turns[before].parent


@pytest.mark.parametrize("parent", [1, 2, -1])
def test_a_turn_goes_on_from_an_earlier_turn_or_from_none(parent: int) -> None:
    with pytest.raises(ValueError, match=f"turn 1 has turn {parent} as its parent"):
        rollout(1.0, turn((1,), (2,)), replace(turn((3,), (4,)), parent=parent), turn((5,), (6,)))


@given(conversations())
def test_every_drawn_token_is_trained_in_exactly_one_row_with_its_own_context(turns: tuple[Turn, ...]) -> None:
    result = rows(rollout(1.0, *token_rows.linked(*turns)), 1.0)
    trained = [
        (row.tokens[:i], row.tokens[i], row.logprobs[i]) for row in result for i in range(len(row.mask)) if row.mask[i]
    ]
    drawn = [
        (t.rendered_ids + t.completion.token_ids[:i], t.completion.token_ids[i], t.completion.logprobs[i])
        for t in turns
        for i in range(len(t.completion.token_ids))
    ]
    assert sorted(trained) == sorted(drawn)


def test_late_tokens_lose_their_advantage_but_stay_in_the_denominator() -> None:
    later = replace(turn((), (5,), version=6), parent=0)
    (row,) = rows(rollout(1.0, turn((1,), (2, 3), version=4), later), 2.0)
    (kept,), late_tokens = mask_tokens([row], oldest_version=5)
    assert late_tokens == 2
    assert kept.advantages == (0.0, 0.0, 0.0, 2.0)
    assert kept.mask == row.mask
    assert mask_tokens([row], oldest_version=4) == ((row,), 0)
