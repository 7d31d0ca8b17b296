"""Games of many turns: guess the number, a calculator as a tool, the towers of Hanoi and a careless teacher of them."""

import ast
import asyncio
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta

from shoal.environments.trl import converse
from shoal.interfaces import Model
from shoal.tasks.sdk import Question, environment
from shoal.types import Json, Message, Outcome, Role, Split, Task, seed_for

_NUMBER = re.compile(r"\d+")


class GuessNumber(msgspec.Struct, frozen=True):
    """The reward is 1 when the number is found in time; `tries` that halve a range suffice for 2^tries - 1 numbers."""

    smallest: Annotated[int, Meta(ge=0)] = 1
    largest: int = 30
    size: int = 7
    """Number of candidates, out of the range above."""
    tries: Annotated[int, Meta(ge=1)] = 3
    remind: bool = True
    """True if a hint also names the numbers that are left."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.largest - self.smallest + 1:
            raise ValueError(f"size: expected 1 to largest - smallest + 1, got {self.size}")

    def draw(self, rng: random.Random) -> Question:
        """A range and a number in it."""
        low = rng.randint(self.smallest, self.largest - self.size + 1)
        high = low + self.size - 1
        text = f"I think of a number from {low} to {high}. Guess it in {self.tries} tries: answer with a number only."
        number = rng.randint(low, high)
        hidden: Json = {"low": low, "high": high, "number": number}
        return Question(text, str(number), info=hidden, split_by=f"{text} {number}")

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Gives hints until the number is found; an answer without a number loses a try."""
        hidden, messages = json.loads(task.info)["info"], list(task.messages)
        low, high, number = hidden["low"], hidden["high"], hidden["number"]
        for tries_left in reversed(range(self.tries)):
            said = await model.answer(messages)
            found = _NUMBER.findall(said.content[:200])
            guess = int(found[-1]) if found else None
            if guess == number:
                return Outcome(reward=1.0)
            if guess is None:
                hint = "Say a number"
            elif guess < number:
                hint, low = "Higher", max(low, guess + 1)
            else:
                hint, high = "Lower", min(high, guess - 1)
            if tries_left:
                left = f": it is from {low} to {high}." if self.remind else "."
                messages += [said, Message(Role.USER, hint + left)]
        return Outcome(reward=0.0)


guess_number = environment("guess_number")(GuessNumber)


PEGS = "ABC"
GOAL = "C"
_MOVE = re.compile(r"\b([ABC])\W*(?:to|->)?\W*([ABC])\b")


class Hanoi(msgspec.Struct, frozen=True):
    """The reward is 1 when all disks are on peg C in time. A move against the rules gets a hint, and counts."""

    disks: Annotated[int, Meta(ge=1, le=12)] = 3
    spare: Annotated[int, Meta(ge=0)] = 2
    """Number of moves beyond 2^disks - 1, which suffice for any start."""

    def draw(self, rng: random.Random) -> Question:
        """Any start but the goal; its `info` has the peg of each disk, the smallest first."""
        pegs = GOAL * self.disks
        while pegs == GOAL * self.disks:
            pegs = "".join(rng.choice(PEGS) for _ in range(self.disks))
        rules = (
            f"Towers of Hanoi with disks 1 (smallest) to {self.disks}. Only the top disk of a peg moves, and never "
            f"onto a smaller one. Bring all disks to peg {GOAL}. Answer with one move at a time, such as A -> B."
        )
        return Question(f"{rules}\n{_shown(pegs)}", info={"pegs": pegs})

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Plays until all disks are on the goal, or the moves are used up."""
        pegs, messages = json.loads(task.info)["info"]["pegs"], list(task.messages)
        for moves_left in reversed(range(2 ** len(pegs) - 1 + self.spare)):
            said = await model.answer(messages)
            match = _MOVE.search(said.content[-200:])
            moved = moved_disk(pegs, match[1], match[2]) if match else None
            if moved is None:
                hint = "That move is against the rules." if match else "Say one move, such as A -> B."
            else:
                pegs, hint = moved, ""
            if pegs == GOAL * len(pegs):
                return Outcome(reward=1.0)
            if moves_left:
                messages += [said, Message(Role.USER, f"{hint}\n{_shown(pegs)}".strip())]
        return Outcome(reward=0.0)


hanoi = environment("hanoi")(Hanoi)


def moved_disk(pegs: str, source: str, target: str) -> str | None:
    """The pegs of the disks after a move; None when the rules forbid the move.

    >>> moved_disk("AAB", "A", "B"), moved_disk("BAB", "A", "B"), moved_disk("BBB", "A", "B")
    ('BAB', None, None)
    """
    top = pegs.find(source)
    if top < 0 or source == target or 0 <= pegs.find(target) < top:
        return None
    return pegs[:top] + target + pegs[top + 1 :]


def best_move(pegs: str) -> tuple[str, str]:
    """The next move of the shortest way to the goal, from a start that is not the goal.

    A disk that is not on its target waits until all smaller disks are on the third peg.

        >>> best_move("AA"), best_move("BAC")
        (('A', 'B'), ('A', 'C'))
    """
    target, move = GOAL, (GOAL, GOAL)
    for peg in reversed(pegs):
        if peg != target:
            move = (peg, target)
            (target,) = set(PEGS) - {peg, target}
    return move


def _shown(pegs: Sequence[str]) -> str:
    """Each peg's disks, the lowest first."""
    disks = {peg: [str(i + 1) for i in reversed(range(len(pegs))) if pegs[i] == peg] for peg in PEGS}
    return "\n".join(f"{peg}: {' '.join(disks[peg]) or '-'}" for peg in PEGS)


REWRITE = [(r"(?s)^.*A: (.*)\nB: (.*)\nC: (.*)$", r"\1/\2/\3"), (" ", "")]
"""Regular expressions that shorten each message of the game to the disks of each peg."""
EVAL_SHARE = 0.5
"""Share of held-out starts, as in examples/turns; the model is never shown them."""


@dataclass(frozen=True, slots=True)
class CarelessTeacher:
    """Implements `interfaces.Model` with the best move, or, at a share of the turns, any move, legal or not."""

    rng: random.Random
    careless_share: float
    said: list[tuple[tuple[Message, ...], str]] = field(default_factory=list)
    """Messages before each answer, and the answer."""
    base_url = anthropic_base_url = api_key = ""

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The next move."""
        disks = messages[-1].content.split("/")
        peg_of = {disk: peg for peg, on in zip(PEGS, disks, strict=True) for disk in on if disk.isdigit()}
        move = "".join(best_move("".join(peg_of[disk] for disk in sorted(peg_of))))
        if self.rng.random() < self.careless_share:
            move = "".join(self.rng.sample(PEGS, 2))
        self.said.append((tuple(messages), move))
        return Message(Role.ASSISTANT, move)

    def openai(self) -> NoReturn:
        """Raises `NotImplementedError`: a teacher has no session."""
        raise NotImplementedError


def played_turns(seed: int, careless_share: float) -> Iterator[tuple[tuple[Message, ...], str]]:
    """Messages before each move, and the move, of an endless sequence of training games."""
    towers = replace(hanoi, seed=seed, rewrite=REWRITE, eval_share=EVAL_SHARE)
    rng = random.Random(seed_for("careless teacher", seed))
    with asyncio.Runner() as runner:
        for index in count():
            teacher = CarelessTeacher(rng, careless_share)
            runner.run(towers.rollout(towers.draw(Split.TRAIN, index), teacher))
            yield from teacher.said


MOST_CHARACTERS = 200
MOST_DIGITS = 200
_FOUND_NUMBER = re.compile(r"-?\d+(?:/\d+)?(?!\d)")
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
        numbers = _FOUND_NUMBER.findall(said.replace(",", "")[-MOST_CHARACTERS:])
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
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
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
