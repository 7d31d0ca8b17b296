"""Tasks of many turns that come with Shoal: each holds the conversations of its tasks itself (`interfaces.Playable`).

guess_number   a number is found by asking whether it is higher or lower
hanoi          the towers of Hanoi, a move at a time
calculator     arithmetic with a tool, called as the model's chat template has tools called
repair         a program is repaired until its tests pass in the sandbox
"""

from collections.abc import Mapping

from shoal.config import TaskConfig
from shoal.errors import TaskError
from shoal.tasks.games.calculator import Calculator
from shoal.tasks.games.guess_number import GuessNumber
from shoal.tasks.games.hanoi import Hanoi
from shoal.tasks.games.repair import Repair
from shoal.tasks.games.seeded_game import SeededGame

GAMES: Mapping[str, type[SeededGame]] = {
    "guess_number": GuessNumber,
    "hanoi": Hanoi,
    "calculator": Calculator,
    "repair": Repair,
}


def turns_service(config: TaskConfig, seed: int) -> SeededGame:
    """The game that `path` names, or else `name`. Raises `TaskError`."""
    chosen = config.path or config.name
    if chosen not in GAMES:
        raise TaskError(f"tasks.{config.name}: expected the name of one of {', '.join(GAMES)}, got {chosen!r}")
    return GAMES[chosen](config, seed)
