"""The towers of Hanoi, a move at a time."""

import random
import re
from collections.abc import Sequence

import msgspec

from shoal.interfaces import Chat
from shoal.tasks.games.seeded_game import Posed, SeededGame, hidden_of
from shoal.types import Outcome, Task

PEGS = "ABC"
GOAL = "C"
_MOVE = re.compile(r"\b([ABC])\W*(?:to|->)?\W*([ABC])\b")


class HanoiParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Difficulty of the game: a start needs at most 2^disks - 1 moves."""

    disks: int = 3
    spare: int = 2
    """Number of moves beyond 2^disks - 1."""

    def __post_init__(self) -> None:
        if not (1 <= self.disks <= 12 and self.spare >= 0):
            raise ValueError("expected 1 to 12 disks and spare >= 0")


class HanoiStart(msgspec.Struct, frozen=True):
    """The peg of each disk, the smallest first."""

    pegs: str


class Hanoi(SeededGame):
    """The reward is 1 when all disks are on peg C in time. A move against the rules gets a hint, and counts."""

    parameters = HanoiParameters

    def posed(self, rng: random.Random) -> Posed:
        """Any start but the goal."""
        n = self._parameters.disks
        pegs = GOAL * n
        while pegs == GOAL * n:
            pegs = "".join(rng.choice(PEGS) for _ in range(n))
        rules = (
            f"Towers of Hanoi with disks 1 (smallest) to {n}. Only the top disk of a peg moves, and never onto a "
            f"smaller one. Bring all disks to peg {GOAL}. Answer with one move at a time, such as A -> B."
        )
        return Posed(f"{rules}\n{_shown(pegs)}", HanoiStart(pegs))

    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Plays until all disks are on the goal, or the moves are used up."""
        pegs, messages = hidden_of(task, HanoiStart).pegs, list(task.messages)
        for moves_left in reversed(range(2 ** len(pegs) - 1 + self._parameters.spare)):
            said = await chat.answer(messages)
            match = _MOVE.search(said.content[-200:])
            moved = moved_disk(pegs, match[1], match[2]) if match else None
            if moved is None:
                hint = "That is no move by the rules." if match else "Say one move, such as A -> B."
            else:
                pegs, hint = moved, ""
            if pegs == GOAL * len(pegs):
                return Outcome(reward=1.0)
            if moves_left:
                messages += [said, self.reply(f"{hint}\n{_shown(pegs)}".strip())]
        return Outcome(reward=0.0)

    @property
    def _parameters(self) -> HanoiParameters:
        assert isinstance(self._given, HanoiParameters)
        return self._given


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
