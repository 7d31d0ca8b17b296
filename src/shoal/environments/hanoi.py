"""The towers of Hanoi, a move at a time."""

import json
import random
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.interfaces import Model
from shoal.tasks.sdk import Question, environment
from shoal.types import Message, Outcome, Role, Task

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
