"""Compares two answers as mathematics: exactly where both are rational numbers, else by math-verify.

The first way takes microseconds, and decides nearly every answer of a data set such as GSM8K. math-verify parses LaTeX
with SymPy and simplifies. It may not end, so it runs in worker processes, which bound it.

Every pattern here is linear in its text: repeats are possessive, and no two ways divide the same characters.
"""

import re
from fractions import Fraction
from itertools import product

from shoal.model.answer import boxed, stated
from shoal.types import UNREAD

_SYMBOL = re.compile(r"[^\W\d_]+(?:\^\{?[23]\}?|[23²³])?|[$€£°%‰]")
_POWER = re.compile(r"(.*?)(?:\^?\{?([23²³])\}?)?", re.DOTALL)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SILENT = (
    "a an the of per in is are was be it its there them they total all altogether left "
    "more each about approximately long wide high tall old away x y n"
)
_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "g": "gram gramme",
    "kg": "kilogram",
    "mg": "milligram",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "ft": "foot feet",
    "in": "inch inche",
    "yd": "yard",
    "mi": "mile",
    "lb": "pound lbs",
    "oz": "ounce",
    "$": "dollar usd buck",
    "€": "euro eur",
    "°": "degree circ",
    "%": "percent percentage pct",
}
_COMPOUNDS = {"mph": "mi h", "kmh": "km h", "kph": "km h", "kmph": "km h", "sq": "square", "cu": "cubic"}
_COMPOUNDS |= {"mps": "m s", "squared": "square", "cubed": "cubic"}
_POWERS = {"2": "square", "3": "cubic", "²": "square", "³": "cubic"}
_SILENT_WORDS = frozenset(_SILENT.split())
_CANONICAL = {other: name for name, others in _NAMES.items() for other in others.split()}


def unit_of(text: str) -> tuple[int, frozenset[str]]:
    """The scale that words such as "million" give a number, and the words of its unit.

    >>> unit_of(" million dollars"), unit_of(" of them") == unit_of("")
    ((1000000, frozenset({'$'})), True)
    >>> unit_of("mph") == unit_of("miles per hour"), unit_of("m^2") == unit_of("square meters")
    (True, True)
    """
    scale, words = 1, []
    text = text.casefold().replace("p.m.", "pm").replace("a.m.", "am").replace("per cent", "percent")
    for symbol in _SYMBOL.findall(text.replace("\\$", "$")):
        word, power = _POWER.fullmatch(symbol).groups()  # type: ignore[union-attr]  # it matches any text
        words += [_POWERS[power]] if power else []
        singular = word[:-1] if len(word) > 3 and word.endswith("s") else word
        if singular in _SCALES:
            scale *= _SCALES[singular]
        elif word not in _SILENT_WORDS:
            words += _COMPOUNDS.get(singular, _CANONICAL.get(singular, singular)).split()
    return scale, frozenset(words)


def agree(one: frozenset[str], other: frozenset[str]) -> bool:
    """True if one unit is absent, or is a part of the other."""
    return one <= other or other <= one


MOST_CHARACTERS = 10_000
"""Characters of a final answer."""

MOST_SYMBOLIC = 600
"""Characters of mathematics that SymPy is asked to read, unless the truth is long too."""

MOST_RATIONAL = 200
"""Characters of a rational number."""

MOST_DIGITS = 4300
"""Number of digits that Python reads as one integer."""

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+"
_HUGE = re.compile(r"[eE][-+]?[0-9]{4}")
_LAST_NUMBER = re.compile(rf"(?:(?<![0-9.)])[-+])?(?:{_UNSIGNED})(?:/[0-9]+)?")
_MEASURED = re.compile(rf"(?<!\^)(?<!\^\{{)(?:{_LAST_NUMBER.pattern})")
"""Numbers that are no powers of a unit."""

_DELIMITERS = re.compile(r"\\[()\[\]]|\$\$?(?!\d)|\\(?:left|right|[!,;:> ]|displaystyle|limits)(?![A-Za-z])")
_DELIMITERS_LEFT = re.compile(r"\\(?:left|right|[!,;:> ])(?![A-Za-z])|\$")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*+\{([^{}]*+)\}(?:\^\{?+\d\}?+)?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!|\s)++(?=\d{3}(?!\d))")
_SHORT_UNITS = "mm|cm|km|mi|ft|yd|in|kg|mg|lb|lbs|oz|ml|cl|hz|am|pm|ms|mph|kmh"
_WORD = (
    rf"(?:(?:{_SHORT_UNITS})\b|(?!(?:sin|cos|tan|sec|csc|cot|log|exp|sqrt|theta|alpha|beta|gamma)\b)[A-Za-zµΩ]{{3,}}+)"
)
_RATIO = r"\s[mgshlNJWV]\s*+/\s*+(?:s|h|l|m|g|kg|cm|min|sec)(?![A-Za-z])(?:\^\{?+\d\}?+|[²³])?+"
"""Ratio of two units whose first has one letter; other letters are variables."""
_UNIT = re.compile(
    rf"(?<=[\d.}}])(?:\^\{{?\\circ\}}?|\\circ|°"
    rf"|{_WORD}(?:\s*+/\s*+[A-Za-z]++|\^\{{?+\d\}}?+)*+\.?+|\sm(?:\^\{{?+[23]\}}?+|[²³])|{_RATIO}|\s[mgshlLNJWV]\b|\s)++$",
    re.IGNORECASE,
)
"""Units after a number, as opposed to variables: words of three letters and more, known short units, degrees."""
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_FRACTION = r"(?:\\frac\s*\{?\s*(-?\d+)\s*\}?\s*\{?\s*(\d+)\s*\}?)"
_RATIONAL = re.compile(
    rf"([-+]?)\s*(?:({_NUMBER})(?:[eE]([-+]?\d{{1,3}}))?(?:\s*/\s*({_NUMBER}))?"
    rf"|(?:(\d+)\s*)?{_FRACTION}|(\d+)\s+(\d+)\s*/\s*(\d+))"
)
_DECIMAL_COMMA = re.compile(r"(?<![\d,.])(\d++),(\d{1,2}+|\d{4,}+)(?![\d,])")
_CLAUSE = re.compile(r"[,;:!?()\n]|\.(?!\d)|\b(?:because|since|which|that|and|or|when|so|after|if)\b", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:begin|end|operatorname|mathbb)\s*+\{[A-Za-z*]++\}|\\[A-Za-z]++")
_WORDS = re.compile(
    r"(?<![^\W\d_])(?!(?:sin|cos|tan|sec|csc|cot|log|exp|sqrt|and|theta|alpha|beta|gamma|inf|infty)(?![^\W\d_]))"
    r"[^\W\d_]{3,}+"
)
_MARKS = re.compile(r"(?<!\\)\$")
_FORMULA = re.compile(r"\$[^$]++\$|\\\([^()]++\\\)")
_BASE = re.compile(r"(?<![\w^])(?<!\^\{)\d[\dA-F]*+[)}]?_\{?\(?(\d++)")
"""The base of a number such as 101_2."""
_INDEXED = re.compile(r"(?:[^\W_]|[)}\]$])_\{?\(?$")
"""Text that ends where an index begins; a number in italics, as in _42_, has a space or a mark before it."""
_DENOMINATOR = re.compile(r"\\frac(\d)(\d)")


def mathematics(answer: str, truth: str, tolerance: float = 0.0) -> tuple[float, str]:
    """1.0 if the answer's final expression equals the truth, and the method that decided.

    >>> mathematics("so \\\\boxed{1\\\\frac{1}{2}}", "1.5")
    (1.0, 'exact')
    """
    given, expected = final_answer(answer), final_answer(truth, whole=True)
    if not expected.endswith("!"):  # a factorial
        given = given.rstrip("!.*_ ")
    if not given:
        return 0.0, f"{UNREAD}no final answer"
    other = rational(expected)
    found = None if other is None else _number_in(given, sentence=in_words(given) or stated(answer) is boxed(answer))
    if other is not None and found is not None:
        one, unit = found
        scale, wanted = unit_of(_tail(expected))
        if not agree(unit, wanted):
            return 0.0, "another unit"
        other *= scale
        pairs = [(one, other)] if unit & wanted & {"%"} else product(_readings(one, unit), _readings(other, wanted))
        share = Fraction(max(tolerance, 0.0))
        return float(any(abs(a - b) <= share * abs(b) for a, b in pairs)), "exact"
    if shown(given).casefold() == shown(expected).casefold():
        return 1.0, "same text"
    if in_words(expected):
        return 0.0, "other words"
    if in_words(given) and not (given := _last_formula(given)):
        return 0.0, f"{UNREAD}words where mathematics is expected"
    if len(given) > max(MOST_SYMBOLIC, 2 * len(expected)):
        return 0.0, f"{UNREAD}longer than {MOST_SYMBOLIC} characters of mathematics"
    bases, wanted_bases = (set(_BASE.findall(_TEXT.sub(r"\1", text))) for text in (given, expected))
    if bases and not wanted_bases <= bases:
        return 0.0, "another base"  # math-verify ignores bases
    return _verify(given, expected, tolerance)


def in_words(text: str) -> bool:
    """True if a text has words, which no symbolic mathematics may read as products of letters.

    >>> in_words("Paris"), in_words("x^2 + 1"), in_words("3 even")
    (True, False, True)
    """
    return _WORDS.search(_COMMAND.sub(" ", _TEXT.sub(r" \1 ", text))) is not None


def _number_in(text: str, *, sentence: bool) -> tuple[Fraction, frozenset[str]] | None:
    """The number of an answer and its unit; in a sentence its first clause if a number, else the last one."""
    text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    for part in (text, _CLAUSE.split(text, maxsplit=1)[0]) if sentence else (text,):
        if (value := rational(part)) is not None:
            scale, unit = unit_of(_tail(part))
            return value * scale, unit
    text = text.replace("\N{MINUS SIGN}", "-")
    if not sentence or (value := last_number(text)) is None:
        return None
    *_, last = _LAST_NUMBER.finditer(text)
    if _INDEXED.search(text[: last.start()]):
        return None  # a base or an index
    scale, unit = unit_of(text[max(last.start() - 2, 0) : last.start()] + " " + _CLAUSE.split(text[last.end() :])[0])
    return value * scale, unit


def _tail(text: str) -> str:
    """A number's text without its digits: its unit. Paired dollars delimit LaTeX and are not a currency."""
    if not text.replace("\\$", "").count("$") % 2:
        text = _MARKS.sub(" ", text)
    text = _MEASURED.sub(" ", _TEXT.sub(r" \1", _THOUSANDS.sub("", text).replace("\\circ", "°")))
    return _COMMAND.sub(" ", text)


def _last_formula(text: str) -> str:
    """The last formula of a sentence, with its delimiters; empty without one."""
    found = _FORMULA.findall(text)
    return found[-1] if found else ""


def final_answer(text: str, *, whole: bool = False) -> str:
    """The final answer of a text: its last \\boxed{}, else after ####, else after "answer:", else the whole text.

    `whole` skips the search for words, for a truth that is only the answer.

    >>> final_answer("First 3. The answer is: 42."), final_answer("\\\\boxed{\\\\frac{1}{2}} or so")
    ('42', '\\\\frac{1}{2}')
    """
    if (box := boxed(text)) is not None:
        return box.strip()[:MOST_CHARACTERS]
    text = text.rpartition("####")[2] if whole else stated(text) or text
    return text.strip()[-MOST_CHARACTERS:].lstrip("*_` \n\t").rstrip("*_`. \n\t")


def rational(text: str) -> Fraction | None:
    """The rational number of a text, read with signs, thousands separators, units, percent and mixed fractions.

    A percentage gives its number: 50 for "50 %".

    >>> [rational(text) for text in ("1,234.5", "-1 1/2", "\\\\frac{3}{4}", "12 cm", "50\\\\%", "x + 1")]
    [Fraction(2469, 2), Fraction(-3, 2), Fraction(3, 4), Fraction(12, 1), Fraction(50, 1), None]
    """
    found = _RATIONAL.fullmatch(_bare(text)) if len(text) <= MOST_RATIONAL else None
    if found is None:
        return None
    sign, number, exponent, denominator, whole, numerator, below, mixed, over, under = found.groups()
    try:
        if number is not None:
            value = Fraction(number) / Fraction(denominator or 1) * Fraction(10) ** int(exponent or 0)
        elif numerator is not None:
            value = Fraction(int(whole or 0)) + Fraction(int(numerator), int(below))
        else:
            value = Fraction(int(mixed)) + Fraction(int(over), int(under))
    except ZeroDivisionError:
        return None
    return -value if sign == "-" else value


def last_number(text: str) -> Fraction | None:
    """The last number in a text: an integer, a decimal, a fraction, or a number with an exponent.

    Returns None without a number, and for a number of more than 4300 digits or with an exponent of more than three
    digits.

    >>> last_number("from 3 to -4.5e1.")
    Fraction(-45, 1)
    """
    found = _LAST_NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found or len(found[-1]) > MOST_DIGITS or _HUGE.search(found[-1]):
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    try:
        return Fraction(numerator) / Fraction(denominator or "1")
    except (ZeroDivisionError, ValueError):  # ValueError: more digits than Python reads
        return None


def _readings(value: Fraction, unit: frozenset[str]) -> list[Fraction]:
    """The possible values of a number next to one without percent: a percentage is its number or its hundredth."""
    return [value, value / 100] if "%" in unit else [value]


def _bare(text: str) -> str:
    """The text without delimiters, spacing, thousands separators, currency, units and percent sign."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _TEXT.sub(r" \1", text)
    text = _THOUSANDS.sub("", text)
    text = _DELIMITERS.sub(" ", text).replace("\\$", " ").replace("$", " ").replace("€", " ").replace("£", " ")
    text = text.replace("\\%", " ").replace("%", " ")
    text = _DENOMINATOR.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"^\s*[A-Za-z]\s*=\s*", "", text.strip())
    return _UNIT.sub("", text).strip().rstrip(".").strip()


def shown(text: str) -> str:
    """The visible text: text commands become their text, and spacing goes."""
    return re.sub(r"\s+", "", _DELIMITERS_LEFT.sub("", _TEXT.sub(r"\1", text)))


def _verify(given: str, expected: str, tolerance: float) -> tuple[float, str]:
    """Compares by math-verify: sets, intervals, equations, matrices, symbolic expressions."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = (LatexExtractionConfig(), ExprExtractionConfig())
    gold, target = (
        parse(text if "$" in text or "\\boxed" in text else f"${text}$", configs, parsing_timeout=None)
        for text in (expected, given)
    )
    if not gold:
        raise ValueError(f"expected mathematics as the task's answer, got {expected[:80]!r}")
    if not target:
        return 0.0, f"{UNREAD}no mathematics in the final answer"
    # Its own alarms are off: they count wall time, and a right answer would be wrong on a busy machine.
    equal = verify(
        gold,
        target,
        timeout_seconds=None,
        numeric_precision=15 if not tolerance else 6,
        allow_set_relation_comp=True,  # an interval and its inequality are equal, whichever the task has
    )
    return float(equal), "math-verify"
