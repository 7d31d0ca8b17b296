"""What peers' answers are reinforced with: against their group or this node's own skill, negatives as told. Pure.

The gradient of a foreign answer that came out worse pushes down a text that the node might never say; measured at tiny
scale that hurt specialists, and leaving those out recovered what sharing had cost (docs/swarm.md). Everything here is
computed from what this node knows by itself: a peer chooses texts, never how much is made of them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from shoal.config import Credit
from shoal.types import Group, Rollout, Sample

LEAST_DEVIATION = 0.25
"""Of a skill that is nearly 0 or 1, so that no single answer weighs more than four."""


def external_rows(group: Group, rows: Sequence[Sample], credit: Credit) -> tuple[Sample, ...]:
    """The rows of an external group, in the order of its finished rollouts (repeated, if it was padded).

    Where the group remembers the node's own skill, advantages are against that (`skill_advantage`). Of these

    *_drop    leaves out the negative ones; the tokens still count in the loss's denominator
    *_weight  multiplies the negative ones with `own_likelihood`
    """
    finished = group.finished
    return tuple(_weighed(row, finished[i % len(finished)], credit) for i, row in enumerate(rows))


def _weighed(row: Sample, rollout: Rollout, credit: Credit) -> Sample:
    advantages = row.advantages
    if rollout.external is not None and rollout.external.skill is not None:
        against = skill_advantage(rollout.reward.value, rollout.external.skill)
        advantages = tuple(against if drawn else 0.0 for drawn in row.mask)
    if credit.drops or credit.weighs:
        factor = 0.0 if credit.drops else own_likelihood(rollout)
        advantages = tuple(a if a >= 0 else a * factor for a in advantages)
    return replace(row, advantages=advantages)


def skill_advantage(reward: float, skill: float) -> float:
    """(r - b) / max(sqrt(b (1 - b)), 0.25), b being this node's mean reward in tasks of the kind.

    It needs no group: one right answer of a person teaches a node that is mostly wrong, and nothing else would.

    >>> skill_advantage(1.0, 0.0), skill_advantage(1.0, 0.5), skill_advantage(0.5, 0.5)
    (4.0, 1.0, 0.0)
    """
    return (reward - skill) / max(math.sqrt(max(skill * (1 - skill), 0.0)), LEAST_DEVIATION)


def own_likelihood(rollout: Rollout) -> float:
    """min(1, exp(l / T - u)): per token, how likely the text is here beside what the node says itself.

    l is the log-likelihood of the T tokens under the node, u the mean per token of its own samples in such tasks.
    """
    own = math.fsum(lp for turn in rollout.turns for lp in turn.completion.logprobs)
    usual = 0.0 if rollout.external is None else rollout.external.usual_logprob
    return math.exp(min(0.0, own / max(1, rollout.drawn_tokens) - usual))
