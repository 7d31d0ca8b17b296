"""Towers of Hanoi as a careless teacher plays them: what the embedded model of many turns is shown first."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from shoal.config import TaskConfig
from shoal.tasks.games.hanoi import PEGS, Hanoi, best_move
from shoal.types import Message, Role, Split, seed_for

REWRITE = [(r"(?s)^.*A: (.*)\nB: (.*)\nC: (.*)$", r"\1/\2/\3"), (" ", "")]
"""Shortens what is told to the disks of each peg."""
EVAL_SHARE = 0.5
"""As in examples/turns: which starts the model is never shown."""


def towers(name: str = "hanoi") -> TaskConfig:
    """The task as the embedded model plays it."""
    return TaskConfig(name=name, service="turns", rewrite=REWRITE, eval_share=EVAL_SHARE)


@dataclass(frozen=True, slots=True)
class CarelessTeacher:
    """Implements `interfaces.Chat`: makes the best move, or, at a share of the turns, any, by the rules or not."""

    rng: random.Random
    careless_share: float
    said: list[tuple[tuple[Message, ...], str]] = field(default_factory=list)
    """What it said, after what."""

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """A move."""
        disks = messages[-1].content.split("/")
        pegs = "".join(PEGS[[str(i) in on for on in disks].index(True)] for i in range(1, _count(disks) + 1))
        move = "".join(best_move(pegs))
        if self.rng.random() < self.careless_share:
            move = "".join(self.rng.sample(PEGS, 2))
        self.said.append((tuple(messages), move))
        return Message(Role.ASSISTANT, move)


def _count(disks: Sequence[str]) -> int:
    return sum(letter.isdigit() for on in disks for letter in on)


def played_turns(seed: int, careless_share: float) -> Iterator[tuple[tuple[Message, ...], str]]:
    """What was said before each move, and the move, of training games one after the other, without end."""
    service = Hanoi(towers(), seed)
    rng = random.Random(seed_for("careless teacher", seed))
    with asyncio.Runner() as runner:
        for index in count():
            teacher = CarelessTeacher(rng, careless_share)
            runner.run(service.play(service.draw(Split.TRAIN, index), teacher))
            yield from teacher.said
