"""Guess the number: a hint after each wrong guess says whether the number is higher or lower."""

import json
import random
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.interfaces import Model
from shoal.tasks.sdk import Question, environment
from shoal.types import Json, Message, Outcome, Role, Task

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
