"""Checkers that need nothing but the answer and the truth. Pure; 1.0 is right and 0.0 is wrong."""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+"
_HUGE = re.compile(r"[eE][-+]?[0-9]{4}")
_NUMBER = re.compile(rf"(?:(?<![0-9.)])[-+])?(?:{_UNSIGNED})(?:/[0-9]+)?")


def exact(answer: str, truth: str) -> float:
    """Whether the answer is the truth, but for space around it.

    >>> exact(" blue\\n", "blue"), exact("Blue", "blue")
    (1.0, 0.0)
    """
    return float(answer.strip() == truth.strip())


def contains(answer: str, truth: str) -> float:
    """Whether the truth occurs in the answer.

    >>> contains("It is blue.", "blue")
    1.0
    """
    return float(truth.strip() in answer)


def number(answer: str, truth: str) -> float:
    """Whether the answer's last number equals the truth's, exactly: 0.1 is one tenth and 1/3 is a third.

    Raises `ValueError` when the truth holds no number.

    >>> number("3 + 4 makes 1,007.50", "2015/2"), number("0.3333", "1/3")
    (1.0, 0.0)
    """
    expected = last_number(truth)
    if expected is None:
        raise ValueError(f"expected a number as the task's answer, got {truth!r}")
    return float(last_number(answer) == expected)


def last_number(text: str) -> Fraction | None:
    """The last number written in a text: integer, decimal, fraction, or with an exponent.

    None when there is none, or one too large to be meant: more than 4300 digits, an exponent of more than three.

    >>> last_number("from 3 to -4.5e1.")
    Fraction(-45, 1)
    """
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found or _HUGE.search(found[-1]):
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    try:
        return Fraction(numerator) / Fraction(denominator or "1")
    except (ZeroDivisionError, ValueError):  # ValueError: more digits than Python reads
        return None


CHECKERS: Mapping[str, Callable[[str, str], float]] = {"exact": exact, "number": number, "contains": contains}
