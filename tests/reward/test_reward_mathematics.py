"""Mathematics: exact where both sides are rational, by math-verify elsewhere."""

import signal
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.reward.mathematics import final_answer, mathematics, rational
from shoal.reward.worker import within

EQUAL = [
    ("The answer is $1,234$.", "1234"),
    ("6 * 3 = 18\n#### 18", "18"),
    ("\\boxed{1\\,000\\,000}", "1000000"),
    ("50%", "0.5"),
    ("50\\%", "50"),
    ("0.1", "10%"),
    ("10\\%", "10 percent"),
    ("10 per cent", "10%"),
    ("0.1", "10 percent"),
    ("10% of 50% is 5%", "5%"),
    ("101_{2}", "101_2"),
    ("5_{10} = 101_2", "101_2"),
    ("101", "101_2"),
    ("\\boxed{400_5}", "400"),
    ("\\boxed{101_{10}}", "101"),
    ("x^2_1", "x_1^2"),
    ("3 1/2", "7/2"),
    ("\\boxed{1\\frac{1}{2}}", "1.5"),
    ("\\boxed{\\frac12}", "0.5"),
    ("\\boxed{12\\text{ cm}^2}", "12"),
    ("\\boxed{90^\\circ}", "90"),
    ("60 km/h", "60"),
    ("I count 7", "7"),
    ("So the total is _42_ apples.", "42"),
    ("So the total is __42__ apples.", "42"),
    ("\\boxed{x=5}", "5"),
    ("\\boxed{\\text{B}}", "B"),
    ("1e3", "1000"),
]
DIFFERENT = [
    ("-7", "7"),
    ("0.1%", "10%"),
    ("0.1\\%", "10\\%"),
    ("1000 percent", "10%"),
    ("0.1 percent", "10 percent"),
    ("The answer is 0.1%.", "10%"),
    ("0.1‰", "10%"),
    ("50 cents", "50%"),
    ("101_3", "101_2"),
    ("\\boxed{101_{3}}", "101_{2}"),
    ("The answer is $101_3$", "101_2"),
    ("so $101_3$", "101_2"),
    ("\\{101_2, 11_2\\}", "\\{101_3, 11_3\\}"),
    ("101_{10}", "101_2"),
    ("101_3", "3"),
    ("x_3", "3"),
    ("1/3", "0.333"),
    ("\\boxed{2x}", "2"),
    ("\\boxed{3\\pi}", "3"),
    ("\\boxed{10,20}", "1020"),
    ("\\boxed{\\text{Monday}}", "\\text{Tuesday}"),
    ("", "3"),
]
SYMBOLIC = [
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1.0),
    ("\\boxed{[0,1]}", "[0,1)", 0.0),
    ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
    ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    ("\\boxed{(2,1)}", "(1,2)", 0.0),
    ("2 \\le x \\le 5", "[2,5]", 1.0),
    ("[2,5]", "2 \\le x \\le 5", 1.0),
    ("2 \\le x < 5", "[2,5]", 0.0),
    ("x > 3", "(3,\\infty)", 1.0),
    ("\\boxed{\\left(\\frac{1}{2},3\\right)}", "(0.5,3)", 1.0),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_what_is_the_same_number_is_right(answer: str, truth: str) -> None:
    assert mathematics(answer, truth)[0] == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_what_is_another_number_or_none_is_wrong(answer: str, truth: str) -> None:
    assert mathematics(answer, truth)[0] == 0.0


@pytest.mark.parametrize(("answer", "truth", "value"), SYMBOLIC)
def test_sets_intervals_and_expressions_are_compared_as_such(answer: str, truth: str, value: float) -> None:
    assert mathematics(answer, truth)[0] == value


TOWER = r"""
from shoal.reward.mathematics import mathematics
from shoal.reward.worker import OutOfTime, within
try:
    within(0.5, lambda answer: mathematics(answer, "1"), r"\boxed{9^{9^{9^9}}}")
except OutOfTime:
    raise SystemExit(3)
"""


def test_a_tower_of_powers_is_stopped_or_ends_its_process() -> None:
    """Here it would end the tests: a power is computed in C, deaf to signals."""
    ended = subprocess.run([sys.executable, "-c", TOWER], check=False, timeout=120)
    assert ended.returncode in (3, -signal.SIGXCPU)


STUBBORN = """
from shoal.reward.worker import OutOfTime, within

def stubborn(_):
    tries = 0
    while True:
        try:
            tries += 1
            while True:
                pass
        except BaseException:  # as reasoning-gym's bare `except` does
            if tries > 2:
                raise

try:
    within(0.2, stubborn, "")
except OutOfTime:
    print("stopped", within(0.2, lambda answer: (1.0, answer), "next"))
"""


def test_a_judgement_that_catches_everything_is_stopped_too() -> None:
    ended = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.strip() == "stopped (1.0, 'next')"


DEAF = """
from shoal.reward.worker import within
within(0.2, lambda answer: (float(sum(range(10**12))), ""), "")
"""


def test_a_judgement_deaf_to_signals_ends_with_its_process() -> None:
    ended = subprocess.run([sys.executable, "-c", DEAF], check=False, timeout=120)
    assert ended.returncode == -signal.SIGXCPU


LIMITED = """
import resource, signal, time
from shoal.reward.worker import LIMITED_CLOCK

def stop(*_):
    print(time.clock_gettime(LIMITED_CLOCK) - most)
    raise SystemExit

signal.signal(signal.SIGXCPU, stop)
most = int(time.clock_gettime(LIMITED_CLOCK)) + 2
resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
while True:  # between two ticks of the kernel, which then miss some of it
    sum(range(20000))
    time.sleep(0.0003)
"""


def test_the_kernel_limits_by_the_clock_that_a_judgement_is_limited_by() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, timeout=120)
    assert 0 <= float(ended.stdout) < 0.02


WORDS = ("wonder", "thinking", "because", "nothing", "whatever", "anything", "together", "actually", "certainly")


@pytest.mark.parametrize("end", [")", ",", " 3"])
def test_a_number_followed_by_prose_is_judged_at_once(end: str) -> None:
    judged = within(0.5, lambda answer: mathematics(answer, "7"), f"7 {' '.join(WORDS)}{end}")
    assert judged[0] in (0.0, 1.0)


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back_however_it_is_written(value: Fraction) -> None:
    sign = "-" if value < 0 else ""
    latex = f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    assert rational(latex) == rational(str(value)) == value
    assert mathematics(f"so \\boxed{{{latex}}}", str(value)) == (1.0, "exact")


def test_a_tolerance_is_relative() -> None:
    assert mathematics("3.14", "3.1416")[0] == 0.0
    assert mathematics("3.14", "3.1416", tolerance=1e-3)[0] == 1.0


def test_the_last_box_with_matching_braces_counts() -> None:
    assert final_answer("\\boxed{1} then \\boxed{\\frac{2}{3}} and \\boxed{") == "\\frac{2}{3}"


@given(st.text(max_size=30))
def test_no_text_is_read_as_a_number_by_accident(text: str) -> None:
    if not any(character.isdigit() for character in text):
        assert rational(text) is None
