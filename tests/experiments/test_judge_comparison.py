"""The statistics of swarm against solo, against counting by hand."""

import io
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colors, image
from scipy import stats

from experiments.judge_figure.comparison import COLOURS, Judged, binned, compare, comparison_png, mann_whitney
from shoal.swarm.judge.messages import Condition

SAMPLES = st.lists(st.integers(0, 1000).map(float), min_size=2, max_size=5)
SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=5)


def counted_p(first: list[float], second: list[float]) -> float:
    """Deals the values in every possible way and counts those with as small, or as large, a rank sum."""
    ranks = stats.rankdata([*first, *second])
    seen = ranks[: len(first)].sum()
    sums = [sum(dealt) for dealt in itertools.combinations(ranks, len(first))]
    tails = (sum(one <= seen for one in sums), sum(one >= seen for one in sums))
    return min(1.0, 2 * min(tails) / len(sums))


@settings(max_examples=30)
@given(SCORES, SCORES)
def test_with_ties_the_rank_test_counts_every_way_to_deal_the_values(first: list[float], second: list[float]) -> None:
    ours = mann_whitney(first, second)
    assert ours.p == pytest.approx(counted_p(first, second), rel=1e-12)
    assert ours.favours == np.mean([(a > b) + (a == b) / 2 for a in first for b in second])


def test_equal_values_say_nothing_however_many() -> None:
    for n in (2, 90):
        assert mann_whitney([1.0] * n, [1.0] * n).p == 1.0


@settings(max_examples=30)
@given(SAMPLES, SAMPLES)
def test_the_test_does_not_care_which_arm_is_called_first(first: list[float], second: list[float]) -> None:
    ours, swapped = mann_whitney(first, second), mann_whitney(second, first)
    assert ours.p == pytest.approx(swapped.p)
    assert ours.u + swapped.u == len(first) * len(second)


def test_a_node_is_one_number_per_bin_and_is_as_old_as_since_it_was_first_judged() -> None:
    results = [
        Judged("late", Condition.SOLO, 70, 0.0),
        Judged("late", Condition.SOLO, 74, 1.0),
        Judged("late", Condition.SOLO, 95, 1.0),
    ]
    assert binned(results, 10) == {Condition.SWARM: {}, Condition.SOLO: {"late": {0: 0.5, 2: 1.0}}}


def curve(node: str, arm: Condition, scores: list[float]) -> list[Judged]:
    return [Judged(node, arm, 10 * index, score) for index, score in enumerate(scores)]


def test_each_band_has_the_nodes_of_its_bin_so_that_weak_nodes_that_leave_are_seen() -> None:
    flat = [Judged(f"solo{i}", Condition.SOLO, 10 * at, 0.5) for i in range(4) for at in range(5)]
    strong = [one for i in range(2) for one in curve(f"strong{i}", Condition.SWARM, [0.8] * 5)]
    weak = [one for i in range(2) for one in curve(f"weak{i}", Condition.SWARM, [0.2] * 2)]
    found = compare([*flat, *strong, *weak], bin_rounds=10)
    assert [point.swarm.mean for point in found] == pytest.approx([0.5, 0.5, 0.8, 0.8, 0.8])
    assert [point.swarm.nodes for point in found] == [4, 4, 2, 2, 2]
    assert (found[0].swarm.low, found[0].swarm.high) == (0.2, 0.8)


def test_a_bin_without_a_score_of_one_condition_has_no_test() -> None:
    results = [*curve("a", Condition.SWARM, [0.1, 0.2, 0.3]), *curve("b", Condition.SOLO, [0.4])]
    results += [Judged("b", Condition.SOLO, 20, 0.6)]
    found = compare(results, bin_rounds=10)
    assert [point.solo.nodes for point in found] == [1, 0, 1]
    assert found[1].solo.mean is None
    assert found[1].test is None
    assert found[1].q is None


def test_bins_are_adjusted_together() -> None:
    results = [one for i in range(5) for one in curve(f"w{i}", Condition.SWARM, [0.5 + i / 100, 0.9 + i / 100])]
    results += [one for i in range(5) for one in curve(f"s{i}", Condition.SOLO, [0.505 + i / 100, 0.1 + i / 100])]
    first, second = compare(results, bin_rounds=10)
    assert second.test is not None
    assert second.test.p == pytest.approx(2 / math.comb(10, 5))
    assert second.q == pytest.approx(2 * second.test.p)
    assert first.q is not None
    assert first.q > 0.5


def test_one_arm_alone_is_drawn_and_not_tested() -> None:
    found = compare(curve("a", Condition.SWARM, [0.1, 0.2]), bin_rounds=10)
    assert [point.swarm.mean for point in found] == [0.1, 0.2]
    assert [point.test for point in found] == [None, None]


def test_the_lines_of_the_picture_can_be_read_on_their_bands() -> None:
    scores = {Condition.SWARM: (0.2, 0.9), Condition.SOLO: (0.1, 0.8)}
    results = [one for arm, two in scores.items() for score in two for one in curve(f"{arm} {score}", arm, [score] * 5)]
    pixels = image.imread(io.BytesIO(comparison_png(compare(results, bin_rounds=10), 10)))[..., :3]
    for colour in COLOURS.values():
        share = np.isclose(pixels, colors.to_rgb(colour), atol=0.01).all(axis=-1).mean()
        assert 0 < share < 0.02  # a line and its points; a whole band is a third of the picture


def test_one_round_of_three_nodes_shows_both_conditions_also_where_they_are_equal() -> None:
    results = [
        *curve("a", Condition.SWARM, [0.5]),
        *curve("b", Condition.SWARM, [0.3]),
        *curve("c", Condition.SOLO, [0.4]),
    ]
    pixels = image.imread(io.BytesIO(comparison_png(compare(results, bin_rounds=10), 10)))[..., :3]
    raw = pixels[:, : pixels.shape[1] * 2 // 3]  # left of the legend
    for colour in COLOURS.values():
        assert np.isclose(raw, colors.to_rgb(colour), atol=0.01).all(axis=-1).sum() > 20


def test_nothing_judged_is_nothing_compared() -> None:
    assert compare([], bin_rounds=10) == ()
