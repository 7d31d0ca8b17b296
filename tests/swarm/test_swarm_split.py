"""How a node divides its steps between its own groups and peers'."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.external_share import WINDOW, AdaptiveSplit, oscillation

STEADY = (0.5, 0.5)


def after(split: AdaptiveSplit, steps: int, supply: float, groups: int = 8) -> list[int]:
    """What a split wants while each own group comes with `supply` groups of peers."""
    found = []
    for _ in range(steps):
        own = groups - split.external
        split.stepped([0.5] * own, supply * own)
        found.append(split.external)
    return found


@pytest.mark.parametrize(
    ("supply", "external"),
    [(0.0, 0), (1 / 3, 2), (1.0, 4), (7 * 0.275, 5), (100.0, 6)],  # the fourth is the paper's: 8 nodes, rho = .275
)
def test_a_split_goes_to_what_peers_supply_and_stays_there(supply: float, external: int) -> None:
    wanted = after(AdaptiveSplit(8, 6), 100, supply)
    assert wanted == sorted(wanted)
    assert wanted[50:] == [external] * 50


def test_a_node_whose_peers_do_not_adapt_takes_just_what_they_give() -> None:
    split = AdaptiveSplit(8, 6)
    for _ in range(300):
        split.stepped([0.5] * (8 - split.external), 3.0)
    assert split.external == 3


def test_reuse_counts_as_supply_but_no_more_than_four_times() -> None:
    assert after(AdaptiveSplit(8, 6, reuse=3), 60, 1 / 3)[-1] == 4
    for reuse in (4, 1000):
        assert after(AdaptiveSplit(80, 60, reuse), 60, 1 / 12, groups=80)[-1] == 20


@given(
    groups=st.integers(2, 16),
    data=st.data(),
    steps=st.lists(
        st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1e6)), max_size=3 * WINDOW
    ),
)
def test_no_rewards_and_no_supply_lead_out_of_bounds(
    groups: int, data: st.DataObject, steps: list[tuple[list[float], float]]
) -> None:
    most = data.draw(st.integers(0, groups - 1))
    split = AdaptiveSplit(groups, most)
    assert split.external == 0
    for rewards, heard in steps:
        split.stepped(rewards, heard)
        assert 0 <= split.external <= most


def test_swinging_rewards_take_places_from_peers_and_calm_ones_give_them_back() -> None:
    split = AdaptiveSplit(8, 6)
    for step in range(4 * WINDOW):
        split.stepped([0.2 if step // 3 % 2 else 0.8] * (8 - split.external), 100.0)
    assert split.external == 2
    after(split, 2 * WINDOW, 100.0)
    assert split.external == 4


@given(st.integers(0, 10_000))
def test_the_chance_of_questions_and_draws_is_seldom_taken_for_oscillation(seed: int) -> None:
    rng = random.Random(seed)
    windows = [
        [[sum(rng.random() < rng.choice((0.1, 0.9)) for _ in range(8)) / 8 for _ in range(4)] for _ in range(WINDOW)]
        for _ in range(20)
    ]
    assert sum(oscillation(window) > 0 for window in windows) <= 7


def test_a_split_without_groups_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="most < groups"):
        AdaptiveSplit(4, 4)


@given(st.integers(0, 3 * WINDOW), st.floats(0, 50), st.booleans())
def test_a_run_that_goes_on_splits_as_the_one_before_would_have(steps: int, supply: float, swings: bool) -> None:
    def step(split: AdaptiveSplit, number: int) -> None:
        own = 8 - split.external
        split.stepped([0.2 if swings and number // 3 % 2 else 0.8] * own, supply)

    whole, life = AdaptiveSplit(8, 6), AdaptiveSplit(8, 6)
    for number in range(steps):
        step(whole, number)
        step(life, number)
        after = AdaptiveSplit(8, 6)
        after.restore(life.state())
        assert after.external == whole.external
        life = after


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 5000, '{"supply": 0}', '{"supply": "x", "cap": 1, "rewards": []}']
)
def test_a_state_that_cannot_be_read_is_as_none(text: str) -> None:
    split = AdaptiveSplit(8, 6)
    split.restore(text)
    assert split.external == 0
    split.restore('{"supply": 1e300, "cap": 99, "rewards": [[], [1.0]]}')
    assert split.external == 6
