"""reasoning-gym's own scorers, prevented from running the answer as code. For worker processes only.

Four scorers call eval() on the answer to see whether it is a Python list. In their modules `eval` reads only literals
here. Five scorers parse the answer with SymPy, which evaluates it with Python's builtins in reach. These see only texts
made of numbers, operators and names of functions; any other text scores as an empty answer.
"""

import ast
import re
import sys
from collections.abc import Callable
from functools import lru_cache

from shoal import procedural
from shoal.errors import TaskError
from shoal.model.answer import final_line
from shoal.types import UNREAD, Receipt

_EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_PARSED = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
_FUNCTIONS = (
    "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|asinh|acosh|atanh|exp|log|ln|sqrt|cbrt|Abs|abs|sign|erf|pi"
)
# Possessive throughout: a text that does not match is refused in linear time.
_EXPRESSION = re.compile(rf"(?:\s|[0-9]++(?:\.[0-9]++)?+|(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z_])|[-+*/^(),])*+")


def scorer_of(receipt: Receipt, truth: str | None) -> Callable[[str], tuple[float, str]]:
    """The function that gives an answer's value and the evidence for it.

    Raises `TaskError` when the receipt cannot be drawn again here, or gives another truth than the task's.
    """
    entry = _entry(receipt)
    if truth is not None and entry.truth != truth:
        raise TaskError(f"{receipt.dataset}: the receipt gives the truth {entry.truth!r}, the task has {truth!r}")

    def score(answer: str) -> tuple[float, str]:
        answer = answer.strip()
        if not answer:
            return 0.0, f"{UNREAD}empty answer"
        if receipt.dataset in _PARSED and not is_expression(answer):
            return entry.score(""), f"{UNREAD}not an arithmetic expression"
        return entry.score(answer), ""

    def read(answer: str) -> tuple[float, str]:
        try:
            return score(answer)
        except Exception as error:  # an odd text may raise anything in a scorer
            return 0.0, f"{UNREAD}{type(error).__name__}: {error}"[:500]

    def best(answer: str) -> tuple[float, str]:
        """The value of the whole answer, or of its final line if that is worth more."""
        found, line = read(answer), final_line(answer)
        return (
            found
            if found[0] >= 1 or line == answer.strip()
            else max(found, read(line), key=lambda one: (one[0], not one[1]))
        )

    return best


def is_expression(text: str) -> bool:
    """True if a text has only numbers, operators and names of functions, so that SymPy may read it.

    >>> is_expression("3*x^2 + sin(x)"), is_expression("exit()")
    (True, False)
    """
    return _EXPRESSION.fullmatch(text) is not None


@lru_cache(maxsize=256)
def _entry(receipt: Receipt) -> procedural.Entry:
    entry = procedural.entry_of(receipt)
    if receipt.dataset in _EVALUATED:
        vars(sys.modules[type(entry.dataset).__module__])["eval"] = ast.literal_eval
    return entry
