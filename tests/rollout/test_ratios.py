"""Quotas of task services: what each may have started, also when nobody is there."""

import math
import random

import pytest

from shoal.rollout.mixture_weights import BOUNDS, ENOUGH, Adjuster
from shoal.rollout.ratios import Quotas

WEIGHTS = {"a": 3.0, "b": 1.0}


def quotas(**options: float) -> Quotas:
    return Quotas(WEIGHTS, **{"lend_at_most": 8.0, **options})


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_weights_that_give_no_share_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a number > 0 for each of one or more tasks"):
        Quotas(weights, lend_at_most=8.0)


def test_a_budget_is_split_by_weight_and_never_shrinks() -> None:
    split = quotas()
    split.grow(8.0)
    assert (split.quota("a"), split.quota("b")) == (6.0, 2.0)
    split.grow(4.0)
    assert (split.quota("a"), split.quota("b")) == (6.0, 2.0)
    split.grow(12.0)
    assert (split.quota("a"), split.quota("b")) == (9.0, 3.0)


def test_tasks_drawn_by_chance_get_whole_groups_each_by_its_weight() -> None:
    rng = random.Random(0)
    drawn = Quotas(WEIGHTS, lend_at_most=8.0, rng=rng)
    steps = []
    for step in range(1, 2001):
        before = drawn.quota("a")
        drawn.grow(4.0 * step)
        steps.append(drawn.quota("a") - before)
    assert drawn.quota("a") + drawn.quota("b") == 8000
    wanted = [math.comb(4, k) * 0.75**k * 0.25 ** (4 - k) for k in range(5)]
    assert [steps.count(k) / 2000 for k in range(5)] == pytest.approx(wanted, abs=0.03), "binomial, not in turn"


def test_what_the_gate_gave_while_nobody_was_there_is_given_to_the_first_who_comes() -> None:
    split = quotas()
    for name in WEIGHTS:
        split.leave(name)
    split.grow(4.0)
    split.grow(8.0)
    assert (split.quota("a"), split.quota("b")) == (0.0, 0.0)
    split.come("b")
    assert split.shares == {"b": 1.0}
    split.grow(8.0)
    assert split.quota("b") == 8.0
    split.come("a")
    split.grow(8.0)
    assert split.quota("a") == 0.0  # given once


def test_the_service_furthest_below_its_quota_is_next_and_none_that_has_reached_it() -> None:
    split = quotas()
    split.grow(8.0)
    started = {"a": 0, "b": 0}
    assert split.next(started, ["a", "b"]) == "a"
    assert split.next(started, ["b"]) == "b"
    assert split.next({"a": 5, "b": 0}, ["a", "b"]) == "b"
    assert split.next({"a": 6, "b": 2}, ["a", "b"]) is None
    assert split.next(started, []) is None


def test_a_service_that_is_away_lends_what_it_does_not_use_and_is_repaid_from_half_of_the_growth() -> None:
    split = quotas()
    split.grow(8.0)
    split.leave("b")
    for _ in range(2):  # what it does not use is lent once
        split.next({"a": 0, "b": 1}, ["a"])
    assert (split.quota("a"), split.quota("b")) == (7.0, 1.0)  # b had started one of its two
    split.come("b")
    split.grow(10.0)  # 1 of 2 repays what b lent; the other is split
    assert (split.quota("a"), split.quota("b")) == (7.75, 2.25)
    split.grow(14.0)
    assert (split.quota("a"), split.quota("b")) == (10.75, 3.25)  # nothing is owed any more


def test_a_service_that_is_away_lends_nothing_of_what_it_still_runs() -> None:
    split = quotas()
    split.grow(8.0)
    split.leave("b")
    split.next({"a": 0, "b": 2}, ["a"])
    assert (split.quota("a"), split.quota("b")) == (6.0, 2.0)


def test_nothing_is_lent_where_nobody_could_use_it() -> None:
    split = quotas()
    split.grow(8.0)
    for name in WEIGHTS:
        split.leave(name)
    assert split.next({"a": 0, "b": 0}, ["a", "b"]) is None
    assert (split.quota("a"), split.quota("b")) == (6.0, 2.0)


def test_no_more_is_repaid_than_may_be_lent() -> None:
    split = quotas(lend_at_most=2.0)
    split.leave("b")
    split.grow(400.0)
    split.come("b")
    before = split.quota("b")
    split.grow(500.0)
    assert split.quota("b") - before == 2.0 + (100 - 2.0) / 4


def test_what_a_resumed_run_has_trained_counts_and_changed_weights_count_from_then_on() -> None:
    split = Quotas(WEIGHTS, lend_at_most=8.0, consumed={"a": 6})
    split.grow(10.0)
    assert (split.quota("a"), split.quota("b")) == (9.0, 1.0)
    split.weigh({"a": 1.0, "b": 1.0})
    split.grow(14.0)
    assert (split.quota("a"), split.quota("b")) == (11.0, 3.0)
    assert split.due({"a": 6, "b": 0}, 4) == {"a": 9.0, "b": 1.0}
    assert split.due({"a": 6}, 8) == {"a": 11.0, "b": 3.0}


def test_shares_of_tokens_weigh_tasks_by_the_length_of_their_answers_and_keep_the_sum_of_the_weights() -> None:
    shares = Adjuster({"brief": 3.0, "wordy": 3.0}, None)
    for name, tokens in (("brief", 10), ("wordy", 50)):
        shares.finished(name, informative=True, tokens=tokens)
    shares.adjust({})
    assert shares.weights == pytest.approx({"brief": 5.0, "wordy": 1.0})


def test_a_task_for_which_the_others_waited_gets_fewer_groups_and_its_reason_says_so() -> None:
    shares = Adjuster({"slow": 1.0, "quick": 1.0}, BOUNDS)
    for _ in range(ENOUGH):
        for name in shares.weights:
            shares.finished(name, informative=True, tokens=10)
            shares.looked(name, holding=name == "slow")
    slow, quick = shares.adjust({"slow": 0.0, "quick": 0.0})
    assert (slow.after, quick.after) == pytest.approx((5 / 6, 7 / 6))
    assert (
        slow.reason == "16 of 16 groups informative; the others waited for it although it ran as many at once as it may"
    )
    assert quick.reason == "16 of 16 groups informative"
