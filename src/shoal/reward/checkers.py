"""Checkers that need only the answer and the truth. Pure; 1.0 is right and 0.0 is wrong."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+"
MOST_DIGITS = 4300
"""Number of digits that Python reads as one integer."""
_HUGE = re.compile(r"[eE][-+]?[0-9]{4}")
_NUMBER = re.compile(rf"(?:(?<![0-9.)])[-+])?(?:{_UNSIGNED})(?:/[0-9]+)?")


def exact(answer: str, truth: str) -> float:
    """1.0 if the answer is the truth, but for space around it.

    >>> exact(" blue\\n", "blue"), exact("Blue", "blue")
    (1.0, 0.0)
    """
    return float(answer.strip() == truth.strip())


def contains(answer: str, truth: str) -> float:
    """1.0 if the truth occurs in the answer.

    >>> contains("It is blue.", "blue")
    1.0
    """
    return float(truth.strip() in answer)


def number(answer: str, truth: str) -> float:
    """1.0 if the answer's last number equals the truth's, exactly: 0.1 is one tenth and 1/3 is a third.

    Raises `ValueError` when the truth holds no number.

    >>> number("3 + 4 makes 1,007.50", "2015/2"), number("0.3333", "1/3")
    (1.0, 0.0)
    """
    expected = last_number(truth)
    if expected is None:
        raise ValueError(f"expected a number as the task's answer, got {truth!r}")
    return float(last_number(answer) == expected)


def last_number(text: str) -> Fraction | None:
    """The last number in a text: an integer, a decimal, a fraction, or a number with an exponent.

    Returns None without a number, and for a number of more than 4300 digits or with an exponent of more than three
    digits.

    >>> last_number("from 3 to -4.5e1.")
    Fraction(-45, 1)
    """
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found or len(found[-1]) > MOST_DIGITS or _HUGE.search(found[-1]):
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    try:
        return Fraction(numerator) / Fraction(denominator or "1")
    except (ZeroDivisionError, ValueError):  # ValueError: more digits than Python reads
        return None


def formatted(answer: str, tags: Sequence[str]) -> tuple[float, str]:
    """1.0 if the answer is these tags in order, each once and not empty, with only space around them.

    >>> formatted("<think>2+2</think>\\n<answer>4</answer>", ["think", "answer"])
    (1.0, '')
    >>> formatted("<answer>4</answer> so there", ["answer"])
    (0.0, 'text outside of the tags')
    """
    rest = answer
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if answer.count(opening) != 1 or answer.count(closing) != 1:
            return 0.0, f"expected {opening} and {closing} once each"
        before, _, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if before.strip() or not closed:
            return 0.0, "text outside of the tags"
        if not inside.strip():
            return 0.0, f"{opening} is empty"
    return (0.0, "text outside of the tags") if rest.strip() else (1.0, "")


def length_share(count: int, at_most: int, over: int, at_least: int) -> float:
    """1 up to `at_most`, falling to 0 over the next `over`; 0 below `at_least`.

    >>> [length_share(count, at_most=10, over=4, at_least=2) for count in (1, 2, 10, 11, 14, 99)]
    [0.0, 1.0, 1.0, 0.75, 0.0, 0.0]
    """
    if count < at_least:
        return 0.0
    if count <= at_most:
        return 1.0
    return max(0.0, 1.0 - (count - at_most) / over) if over else 0.0


SCRIPTS: Mapping[str, tuple[str, ...]] = {
    **{
        name: (name.upper(),)
        for name in ("latin", "cyrillic", "greek", "hangul", "arabic", "hebrew", "devanagari", "thai")
    },
    "han": ("CJK",),
    "kana": ("HIRAGANA", "KATAKANA"),
}
"""Prefixes of the Unicode names of a script's letters."""


def script_share(answer: str, script: str) -> float:
    """The share of the letters that belong to a script; 1 without letters.

    >>> script_share("It is \u6c34.", "latin"), script_share("42", "han")
    (0.8, 1.0)
    """
    letters = [character for character in answer if character.isalpha()]
    own = sum(unicodedata.name(letter, "").startswith(SCRIPTS[script]) for letter in letters)
    return own / len(letters) if letters else 1.0
