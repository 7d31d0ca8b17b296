"""Rules are programs that solve tasks, as an `Answerer`: `truth`, or a user's `module:function`."""

import asyncio
import random
from collections.abc import Callable, Sequence
from string import ascii_letters, digits
from typing import TypeAlias

from shoal.swarm.offer import GeneratorKind, OfferedRollout
from shoal.swarm.strategy import own_function
from shoal.types import Task

Rule: TypeAlias = Callable[[Task, int, random.Random], Sequence[str]]
"""(task, most answers, randomness) -> answers; none where the rule does not apply. Runs in a thread."""


def truth(task: Task, n: int, rng: random.Random) -> list[str]:
    """Answers with the known truth and with slips from it, half of each, so that rewards differ.

    >>> from shoal.types import Message, Role
    >>> truth(Task("1", "t", (Message(Role.USER, "?"),), "abc"), 1, random.Random(0))
    ['abc']
    """
    if not task.answer:
        return []
    right = (n + 1) // 2
    return [task.answer] * right + [slip(task.answer, rng) for _ in range(n - right)]


def slip(answer: str, rng: random.Random) -> str:
    """Replaces one character by another of its sort."""
    i = rng.randrange(len(answer))
    alphabet = digits if answer[i].isdigit() else ascii_letters[:26]
    return answer[:i] + rng.choice([one for one in alphabet if one != answer[i]]) + answer[i + 1 :]


class RuleSolver:
    """Answerer by a rule."""

    kind = GeneratorKind.RULE

    def __init__(self, name: str, seed: int) -> None:
        """Raises `ConfigError` for a name that is no rule."""
        self.name = name
        self._rule: Rule = truth if name == "truth" else own_function("rule", name, ["truth"])
        self._rng = random.Random(seed)

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        """Returns up to `n` answers of the rule. Raises the rule's exceptions."""
        texts = await asyncio.to_thread(self._rule, task, n, self._rng)
        return [OfferedRollout(text) for text in texts[:n]]
