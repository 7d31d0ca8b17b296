"""Two models on the same questions: what is certain, and when."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from null_runs import null_runs, power
from shoal.confidence import STAKES, EffectBounds, MeanBounds
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.rollout.comparison import Comparison, certified, compared
from shoal.rollout.evaluation import CORRECT
from shoal.types import Message, Reward, RewardStatus, Role, Rollout, RolloutStatus, Task


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


Drawn = list[tuple[bool, float, float]]
DRAWN = st.lists(st.tuples(st.booleans(), st.sampled_from([1 / 8, 1 / 4, 1 / 2, 0.9]), st.floats(0, 1)), max_size=40)


def capital(drawn: Drawn, effect: float, sign: int) -> float:
    """Mean capital of the gamblers who bet that the effect is larger (sign 1) or smaller (-1), outcome by outcome."""
    ends = []
    for stake in STAKES[:, 0]:
        money, outcomes = 1.0, [0.5]
        for is_new, chance, outcome in drawn:
            usual = sum(outcomes) / len(outcomes)
            of_new, of_old = (
                (lambda y, c=usual, p=chance: (y - c) / p),
                (lambda y, c=usual, p=chance: (c - y) / (1 - p)),
            )
            possible = [sign * (of(y) - effect) for of in (of_new, of_old) for y in (0, 1)]
            money *= 1 + stake / max(-min(possible), 1e-9) * sign * ((of_new if is_new else of_old)(outcome) - effect)
            outcomes.append(outcome)
        ends.append(money)
    return float(np.mean(ends))


@given(DRAWN)
def test_an_effect_is_refuted_once_the_capital_against_it_is_large(drawn: Drawn) -> None:
    bounds, lows, highs = EffectBounds(0.2), [-1.0], [1.0]
    for at, (is_new, chance, outcome) in enumerate(drawn):
        bounds.add(is_new, chance, outcome)
        grid = [round(-1 + 0.005 * i, 3) for i in range(401)]
        lows.append(max([-1.0, *(one for one in grid[::40] if capital(drawn[: at + 1], one, 1) >= 10)]))
        highs.append(min([1.0, *(one for one in grid[::40] if capital(drawn[: at + 1], one, -1) >= 10)]))
    assert max(lows) <= bounds.low + 1e-9
    assert bounds.low < max(lows) + 0.2
    assert min(highs) >= bounds.high - 1e-9
    assert bounds.high > min(highs) - 0.2


@pytest.mark.parametrize("wrong", [(0.5, 1.1), (0.5, float("nan")), (0.0, 1.0), (1.0, 1.0)])
def test_an_outcome_or_a_chance_outside_the_range_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"an outcome in \[0, 1\]"):
        EffectBounds(0.05).add(True, *wrong)


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


def test_accuracies_are_means_over_the_questions() -> None:
    found = compared(evaluated([1.0, 0.0, 0.0, 1.0, CORRECT], [1.0] * 5), evaluated([0.0] * 4 + [1.0], [0.0] * 5))
    assert found is not None
    assert (found.overall.first, found.overall.second) == pytest.approx((0.6, 0.2))
    assert (found.parts["greedy"].first, found.parts["greedy"].second) == (1.0, 0.0)


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


def test_other_questions_under_the_same_ids_are_not_compared(tmp_path: Path) -> None:
    """A run that goes on with other settings of its tasks draws other questions under the ids of the first ones."""

    def drawn(step: int, text: str, truth: str, reward: float) -> None:
        task = Task("sums/eval/0", "sums", (Message(Role.USER, text),), truth)
        rollouts = Rollout("r", (), (), Reward(reward)), Rollout("r", (), (), Reward(reward))
        purposes = zip(("sampled", "greedy"), rollouts, strict=True)
        write_answers(tmp_path, step, (HeldOutAnswer.of(step, task, name, 0, one) for name, one in purposes))

    drawn(0, "13 * 17?", "221", 0.0)
    drawn(20, "1 + 1?", "2", 1.0)
    assert certified(tmp_path) is None
    drawn(20, "13 * 17?", "221", 1.0)
    found = certified(tmp_path)
    assert found is not None
    assert found.overall.bounds.count == 1


def test_more_answers_to_a_question_are_no_better_pass_at_k() -> None:
    n = 40
    once = evaluated([0.0] * n, [0.0] * n)
    later = [answer(at, "sampled", float(k == 3), position=k) for at in range(n) for k in range(4)]
    found = compared(once, later + [answer(at, "greedy", 0.0) for at in range(n)])
    assert found is not None
    assert found.parts["pass_at_k"].second == 0
