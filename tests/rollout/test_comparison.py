"""Two models on the same questions: what is certain, and when."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from null_runs import null_runs, power
from shoal.confidence import MeanBounds
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.rollout.comparison import Comparison, certified, compared
from shoal.types import Message, Reward, RewardStatus, Role, RolloutStatus


def answer(question: int, purpose: str, value: float, *, task: str = "sums", position: int = 0) -> HeldOutAnswer:
    messages = (Message(Role.USER, "?"), Message(Role.ASSISTANT, "!"))
    reward = Reward(value) if value == value else Reward(0.0, RewardStatus.FAILED)
    return HeldOutAnswer(
        0, f"q{question}", task, "1", purpose, position, messages, 1, reward, RolloutStatus.FINISHED, "", 1
    )


def evaluated(sampled: list[float], greedy: list[float], task: str = "sums") -> list[HeldOutAnswer]:
    return [
        one
        for at, (free, best) in enumerate(zip(sampled, greedy, strict=True))
        for one in (answer(at, "sampled", free, task=task), answer(at, "greedy", best, task=task))
    ]


def test_equal_models_are_rarely_called_different_whenever_one_looks() -> None:
    assert null_runs(60, 200, seed=7) <= 0.05


def test_a_true_difference_is_found_with_few_more_questions_than_a_fixed_test() -> None:
    found = power(0.2, 5, seed=0)
    assert found["sequential"] is not None
    assert found["sequential"] < 4 * float(found["fixed"] or 0)


@given(st.lists(st.floats(-1, 1), max_size=30))
def test_bounds_only_narrow_and_stay_in_range(values: list[float]) -> None:
    bounds, low, high = MeanBounds(0.05), -1.0, 1.0
    for value in values:
        bounds.add(value)
        assert low <= bounds.low
        assert bounds.high <= high
        low, high = bounds.low, bounds.high
    assert bounds.mean == pytest.approx(np.mean(values) if values else 0.0, abs=1e-9)


def test_swapped_models_swap_the_bounds() -> None:
    ours, theirs = MeanBounds(0.05), MeanBounds(0.05)
    for value in np.random.default_rng(0).choice([-1.0, 0.0, 1.0], 200, p=[0.1, 0.5, 0.4]):
        ours.add(float(value))
        theirs.add(-float(value))
    assert (ours.low, ours.high) == pytest.approx((-theirs.high, -theirs.low))
    assert ours.low > 0


@pytest.mark.parametrize("value", [1.01, -2.0, float("nan")])
def test_a_value_outside_the_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"expected a number in \[-1, 1\]"):
        MeanBounds(0.05).add(value)


def test_sharpening_and_a_new_skill_are_told_apart() -> None:
    n = 200
    before = evaluated([0.0] * n, [0.0] * n)
    sharper = compared(before, evaluated([1.0] * n, [0.0] * n))
    skilled = compared(before, evaluated([1.0] * n, [1.0] * n))
    assert sharper is not None
    assert skilled is not None
    assert "greedy answers are not surely better" in sharper.sentence()
    assert "a new skill" in skilled.sentence()
    assert sharper.sentence().startswith("better than the start by at least ")
    worse = compared(evaluated([1.0] * n, [1.0] * n), before)
    assert worse is not None
    assert worse.sentence("theirs").startswith("worse than theirs by at least ")


def test_two_answers_to_two_questions_claim_nothing() -> None:
    few = compared(evaluated([0.0, 0.0], [0.0, 0.0]), evaluated([1.0, 1.0], [1.0, 1.0]))
    assert few is not None
    assert few.sentence().startswith("not surely better or worse than the start")
    assert not few.decided


def test_parts_share_the_error_and_answers_without_a_verdict_are_left_out_and_counted() -> None:
    comparison = Comparison(["sums", "words"], samples=2)
    assert {row.bounds.error for row in comparison.parts.values()} == {0.05 / 4}
    for question in range(30):
        both = [
            [answer(question, "sampled", value, task="sums", position=at) for at in range(2)]
            + [answer(question, "greedy", 1.0, task="sums")]
            for value in (0.0, 1.0)
        ]
        comparison.add(*both)
    unjudged = [answer(99, "sampled", float("nan")), answer(99, "greedy", 1.0)]
    comparison.add(unjudged, both[1])
    assert comparison.unjudged == 1
    assert comparison.overall.bounds.count == 30
    assert comparison.parts["sums"].bounds.count == comparison.parts["pass_at_k"].bounds.count == 30
    assert comparison.parts["words"].bounds.count == 0


def test_a_run_is_compared_with_its_start(tmp_path) -> None:
    assert certified(tmp_path) is None
    write_answers(tmp_path, 0, evaluated([0.0] * 90, [0.0] * 90))
    assert certified(tmp_path) is None
    write_answers(tmp_path, 20, evaluated([1.0] * 90, [1.0] * 90))
    found = certified(tmp_path)
    assert found is not None
    assert found.decided
    assert found.sentence().startswith("better than the start")
