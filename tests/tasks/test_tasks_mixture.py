"""Tasks are interleaved by weight, exactly and deterministically."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TaskError
from shoal.interfaces import Environment
from shoal.tasks.mixture import Mixture
from shoal.types import Split, Task


@dataclass
class Counting(Environment):
    """A task service whose tasks say where they come from."""

    name: str

    def draw(self, split: Split, index: int) -> Task:
        return Task(f"{self.name}/{split}/{index}", self.name, ())


def mixture(*weights: float) -> Mixture:
    return Mixture([Counting(f"s{number}") for number in range(len(weights))], weights)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_over_any_prefix_each_count_is_its_weight_times_one_number_rounded(weights: list[int]) -> None:
    mixed = mixture(*weights)
    counts = [0] * len(weights)
    for turn in range(2 * sum(weights)):
        number, own_index = mixed.turn(turn)
        assert own_index == counts[number]
        counts[number] += 1
        lowest = max((count - 0.5) / weight for count, weight in zip(counts, weights, strict=True))
        highest = min((count + 0.5) / weight for count, weight in zip(counts, weights, strict=True))
        assert lowest <= highest + 1e-9


def test_a_draw_depends_on_its_arguments_alone() -> None:
    forward, backward = mixture(3, 0.1, 1.7), mixture(3, 0.1, 1.7)
    first = [forward.draw(Split.TRAIN, index) for index in range(300)]
    assert [backward.draw(Split.TRAIN, index) for index in reversed(range(300))] == first[::-1]


def test_a_turn_as_far_as_a_random_number_takes_no_memory_of_those_before() -> None:
    mixed = mixture(3, 0.5)
    number, own_index = mixed.turn(7 * 10**9 + 2)
    assert (number, own_index) == (mixed.turn(2)[0], 10**9 * (6, 1)[number] + mixed.turn(2)[1])
    assert len(mixed._turns) <= 7


def test_weights_are_relative() -> None:
    assert [mixture(1, 3).draw(Split.EVAL, i) for i in range(40)] == [
        mixture(0.1, 0.3).draw(Split.EVAL, i) for i in range(40)
    ]


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (1.0, -2.0)])
def test_a_mixture_needs_weights_above_zero(weights: tuple[float, ...]) -> None:
    with pytest.raises(TaskError, match="weight > 0"):
        mixture(*weights)
