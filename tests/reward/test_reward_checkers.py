"""Checkers that need only the answer and the truth."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checker import Contains, Exact, Number
from shoal.reward.mathematics import last_number
from shoal.reward.worker import judge_of, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42.", Fraction(42)),
        ("-7", Fraction(-7)),
        ("\N{MINUS SIGN}7", Fraction(-7)),
        ("3-4", Fraction(4)),
        ("3 - -4", Fraction(-4)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1, 2, 3", Fraction(3)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("2.5e-3", Fraction(1, 400)),
        ("1/0", None),
        ("1e99999999", None),
        ("9" * 5000, None),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text_is_read_exactly(text: str, value: Fraction | None) -> None:
    assert last_number(text) == value


@settings(max_examples=100, deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(value: Fraction) -> None:
    assert last_number(f"so 17 and then {value}") == value
    assert number(f"so {value}", str(value))[0] == 1.0


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=10))
def test_no_text_makes_a_checker_fail(answer: str, truth: str) -> None:
    for spec, known in ((Exact(), truth), (Contains(), truth), (Number(), "1")):
        assert judge_of(spec, known)(answer)[0] in {0.0, 1.0}


def test_a_truth_without_a_number_is_the_tasks_fault() -> None:
    with pytest.raises(ValueError, match="expected a number as the task's answer"):
        number("1", "one")
