"""What peers' answers are reinforced with: against their group or this node's own skill, negatives as told. Pure.

The gradient of a foreign answer that came out worse pushes down a text that the node might never say; measured at tiny
scale that hurt specialists, and leaving those out recovered what sharing had cost (docs/swarm.md).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from shoal.config import Credit
from shoal.swarm.encoding import GENERATOR_LOGPROB, OWN_SKILL
from shoal.types import Group, Rollout, Sample

LEAST_DEVIATION = 0.25
"""Of a skill that is nearly 0 or 1, so that no single answer weighs more than four."""


def external_rows(group: Group, rows: Sequence[Sample], credit: Credit) -> tuple[Sample, ...]:
    """The rows of an external group, in the order of its finished rollouts (repeated, if it was padded).

    Where the group remembers the node's own skill, advantages are against that (`skill_advantage`). Of these

    *_drop    leaves out the negative ones; the tokens still count in the loss's denominator
    *_weight  multiplies the negative ones with `likelihood_ratio`
    """
    finished, negatives = group.finished, credit.partition("_")[2]
    return tuple(_weighed(row, finished[i % len(finished)], negatives) for i, row in enumerate(rows))


def _weighed(row: Sample, rollout: Rollout, negatives: str) -> Sample:
    advantages = row.advantages
    skill = dict(rollout.reward.parts).get(OWN_SKILL)
    if skill is not None:
        against = skill_advantage(rollout.reward.value, skill)
        advantages = tuple(against if drawn else 0.0 for drawn in row.mask)
    if negatives:
        factor = 0.0 if negatives == "drop" else likelihood_ratio(rollout)
        advantages = tuple(a if a >= 0 else a * factor for a in advantages)
    return replace(row, advantages=advantages)


def skill_advantage(reward: float, skill: float) -> float:
    """(r - b) / max(sqrt(b (1 - b)), 0.25), b being this node's mean reward in tasks of the kind.

    It needs no group: one right answer of a person teaches a node that is mostly wrong, and nothing else would.

    >>> skill_advantage(1.0, 0.0), skill_advantage(1.0, 0.5), skill_advantage(0.5, 0.5)
    (4.0, 1.0, 0.0)
    """
    return (reward - skill) / max(math.sqrt(max(skill * (1 - skill), 0.0)), LEAST_DEVIATION)


def likelihood_ratio(rollout: Rollout) -> float:
    """min(1, exp((l_own - l_generator) / T)): per token of the own encoding, how likely the node would be to say it.

    T is the number of own tokens. A generator without likelihoods (a person, a rule) counts as certain of its text.
    """
    generator = dict(rollout.reward.parts).get(GENERATOR_LOGPROB, 0.0)
    own = math.fsum(lp for turn in rollout.turns for lp in turn.completion.logprobs)
    return math.exp(min(0.0, (own - generator) / max(1, rollout.drawn_tokens)))
