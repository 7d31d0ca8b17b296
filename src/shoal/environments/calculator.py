"""Arithmetic with a calculator that the model calls as a tool, in its chat template's own form."""

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.environments.trl import converse
from shoal.interfaces import Model
from shoal.tasks.sdk import Question, environment
from shoal.types import Outcome, Role, Task

MOST_CHARACTERS = 200
MOST_DIGITS = 200
_NUMBER = re.compile(r"-?\d+(?:/\d+)?(?!\d)")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(msgspec.Struct, frozen=True):
    """The reward is 1 when the last number of the first answer without a call is the value."""

    terms: Annotated[int, Meta(ge=2, le=20)] = 4
    digits: Annotated[int, Meta(ge=1, le=9)] = 3
    turns: Annotated[int, Meta(ge=1)] = 6
    """Number of answers in one rollout; an answer may have several calls."""

    def draw(self, rng: random.Random) -> Question:
        """Sums, differences and products of whole numbers."""
        expression = str(rng.randrange(1, 10**self.digits))
        for _ in range(self.terms - 1):
            sign, number = rng.choice("+-*"), rng.randrange(1, 10**self.digits)
            whole = f"({expression})" if sign == "*" and " " in expression else expression
            expression = f"{whole} {sign} {number}"
        text = f"What is {expression}? Use the calculator, then answer with the number."
        return Question(text, value_of(expression))

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Answers calls until the model makes none."""
        messages = list(task.messages)
        await converse(model, messages, {"calculator": self.calculator}, self.turns)
        said = messages[-1].content if messages[-1].role is Role.ASSISTANT else ""
        numbers = _NUMBER.findall(said.replace(",", "")[-MOST_CHARACTERS:])
        return Outcome(reward=float(bool(numbers) and numbers[-1] == task.answer))

    @staticmethod
    def calculator(expression: str) -> str:
        """Gives the exact value of an expression of numbers, + - * / and parentheses.

        Args:
            expression: The expression.
        """
        return value_of(expression)


calculator = environment("calculator")(Calculator)


def value_of(expression: str) -> str:
    """The exact value of an expression. Raises `ValueError` with the reason.

    >>> value_of("(2 + 3) * 4"), value_of("1 / 3")
    ('20', '1/3')
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"expected at most {MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("expected an expression of numbers, + - * / and parentheses") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if max(abs(value.numerator), value.denominator).bit_length() > 4 * MOST_DIGITS:
        raise ValueError(f"more than {MOST_DIGITS} digits")
    return str(value)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("expected an expression of numbers, + - * / and parentheses")
