"""Guess the number: a hint after each wrong guess says whether the number is higher or lower."""

import random
import re

import msgspec

from shoal.interfaces import Chat
from shoal.tasks.games.seeded_game import Posed, SeededGame, hidden_of
from shoal.types import Outcome, Task

_NUMBER = re.compile(r"\d+")


class GuessParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Difficulty of the game: `tries` that halve the range find any of 2^tries - 1 numbers."""

    smallest: int = 1
    largest: int = 30
    size: int = 7
    """Number of candidates, out of the range above."""
    tries: int = 3
    remind: bool = True
    """True if a hint also names the numbers that are left."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.largest - self.smallest + 1:
            raise ValueError(f"size: expected 1 to largest - smallest + 1, got {self.size}")
        if self.tries < 1 or self.smallest < 0:
            raise ValueError("tries and smallest: expected at least 1 and 0")


class Secret(msgspec.Struct, frozen=True):
    """The number to guess, and its range."""

    low: int
    high: int
    number: int


class GuessNumber(SeededGame):
    """The reward is 1 when the number is found within the tries."""

    parameters = GuessParameters

    def posed(self, rng: random.Random) -> Posed:
        """A range and a number in it."""
        given = self._parameters
        low = rng.randint(given.smallest, given.largest - given.size + 1)
        high = low + given.size - 1
        text = f"I think of a number from {low} to {high}. Guess it in {given.tries} tries: answer with a number only."
        number = rng.randint(low, high)
        return Posed(text, Secret(low, high, number), str(number))

    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Gives hints until the number is found; an answer without a number loses a try."""
        secret, messages = hidden_of(task, Secret), list(task.messages)
        low, high = secret.low, secret.high
        for tries_left in reversed(range(self._parameters.tries)):
            said = await chat.answer(messages)
            found = _NUMBER.findall(said.content[:200])
            guess = int(found[-1]) if found else None
            if guess == secret.number:
                return Outcome(reward=1.0)
            if guess is None:
                hint = "Say a number"
            elif guess < secret.number:
                hint, low = "Higher", max(low, guess + 1)
            else:
                hint, high = "Lower", min(high, guess - 1)
            if tries_left:
                left = f": it is from {low} to {high}." if self._parameters.remind else "."
                messages += [said, self.reply(hint + left)]
        return Outcome(reward=0.0)

    @property
    def _parameters(self) -> GuessParameters:
        assert isinstance(self._given, GuessParameters)
        return self._given
