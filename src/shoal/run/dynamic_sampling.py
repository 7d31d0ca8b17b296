"""Dynamic sampling: groups whose rewards are all equal are given up for others, within the staleness budget."""

from collections.abc import Callable
from typing import TypeAlias

from shoal.experience import Buffer
from shoal.trainer.advantage import is_informative, turn_returns
from shoal.types import Group, Rollout

Returns: TypeAlias = Callable[[Rollout], list[float]]
UNINFORMATIVE = "uninformative"
REDRAWS_PER_GROUP = 3
"""Bound on what one step gives up: on tasks that are all too easy or too hard it would never end."""


async def informative_groups(buffer: Buffer, n: int, version: int, returns: Returns = turn_returns) -> list[Group]:
    """Takes `n` groups for `version`, dropping those that teach nothing; their budget lets others start.

    `returns` is what a rollout's rewards come to, turn by turn.

    After `REDRAWS_PER_GROUP * n` drops it takes what comes. A dropped group stays in the log, with its reason, and is
    never offered again. Source: dynamic sampling of DAPO (arXiv 2503.14476 §3.2).
    """
    kept: list[Group] = []
    room = REDRAWS_PER_GROUP * n
    while len(kept) < n:
        taken = await buffer.take(n - len(kept), version)
        idle = {group.id for group in [group for group in taken if not is_informative(group, returns)][:room]}
        if idle:
            await buffer.drop(sorted(idle), UNINFORMATIVE)
        room -= len(idle)
        kept += [group for group in taken if group.id not in idle]
    return kept
