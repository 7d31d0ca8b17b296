"""Units of numbers in answers: two units agree if one has all words of the other, or if one is absent. Pure."""

import re

_SYMBOL = re.compile(r"[^\W\d_]+(?:\^\{?[23]\}?|[23²³])?|[$€£°]")
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
    for symbol in _SYMBOL.findall(text.replace("p.m.", "pm").replace("a.m.", "am").replace("\\$", "$")):
        word, power = _POWER.fullmatch(symbol.casefold()).groups()  # type: ignore[union-attr]  # it matches any text
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
