"""Dynamic sampling replaces groups whose rewards are all equal, within the staleness budget."""

from dataclasses import replace

from shoal.experience.buffer import Buffer
from shoal.rollout.reward_hooks import BEFORE
from shoal.trainer.advantage import is_informative, turn_returns
from shoal.types import Group, Rollout

UNINFORMATIVE = "uninformative"
REDRAWS_PER_GROUP = 3
"""Drops per wanted group at most: a step on tasks that are all too easy or too hard would never end."""


def outcome_returns(rollout: Rollout) -> list[float]:
    """Returns of a rollout by its outcome, before any deduction for length.

    >>> from shoal.types import Reward
    >>> outcome_returns(Rollout("r", (), (), Reward(0.75, parts=((BEFORE, 1.0),))))
    [1.0]
    """
    before = next((value for name, value in rollout.reward.parts if name == BEFORE), rollout.reward.value)
    return turn_returns(replace(rollout, reward=replace(rollout.reward, value=before)))


async def informative_groups(buffer: Buffer, n: int, version: int) -> list[Group]:
    """Takes `n` groups for `version` and drops uninformative groups, whose budget lets others start.

    Rollouts are compared by their outcomes: an all-wrong group teaches nothing, though its answers differ in length.

    After `REDRAWS_PER_GROUP * n` drops every group is taken. A dropped group stays in the log with its reason and is
    never offered again. Source: dynamic sampling of DAPO (arXiv 2503.14476 §3.2).
    """
    kept: list[Group] = []
    room = REDRAWS_PER_GROUP * n
    while len(kept) < n:
        taken = await buffer.take(n - len(kept), version)
        idle = {group.id for group in [group for group in taken if not is_informative(group, outcome_returns)][:room]}
        if idle:
            await buffer.drop(sorted(idle), UNINFORMATIVE)
        room -= len(idle)
        kept += [group for group in taken if group.id not in idle]
    return kept
