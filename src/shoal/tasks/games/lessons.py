"""Towers of Hanoi played by a careless teacher: the first lessons of the embedded model of many turns."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from shoal.config import TaskConfig
from shoal.tasks.games.hanoi import PEGS, Hanoi, best_move
from shoal.types import Message, Role, Split, seed_for

REWRITE = [(r"(?s)^.*A: (.*)\nB: (.*)\nC: (.*)$", r"\1/\2/\3"), (" ", "")]
"""Regular expressions that shorten each message of the game to the disks of each peg."""
EVAL_SHARE = 0.5
"""Share of held-out starts, as in examples/turns; the model is never shown them."""


def towers(name: str = "hanoi") -> TaskConfig:
    """The task as the embedded model plays it."""
    return TaskConfig(name=name, service="turns", rewrite=REWRITE, eval_share=EVAL_SHARE)


@dataclass(frozen=True, slots=True)
class CarelessTeacher:
    """Implements `interfaces.Chat` with the best move, or, at a share of the turns, any move, legal or not."""

    rng: random.Random
    careless_share: float
    said: list[tuple[tuple[Message, ...], str]] = field(default_factory=list)
    """Messages before each answer, and the answer."""

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The next move."""
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
    """Messages before each move, and the move, of one training game after the other, without end."""
    service = Hanoi(towers(), seed)
    rng = random.Random(seed_for("careless teacher", seed))
    with asyncio.Runner() as runner:
        for index in count():
            teacher = CarelessTeacher(rng, careless_share)
            runner.run(service.play(service.draw(Split.TRAIN, index), teacher))
            yield from teacher.said
