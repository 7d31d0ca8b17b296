"""Towers of Hanoi played by a careless teacher: the first lessons of the embedded model of many turns."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NoReturn

from shoal.environments.hanoi import PEGS, best_move, hanoi
from shoal.types import Message, Role, Split, seed_for

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
