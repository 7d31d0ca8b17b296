"""What is done with foreign answers that came out worse than their group. Pure.

Their gradient pushes down texts that the node might never say; measured at tiny scale that hurt specialists, and
leaving them out recovered what sharing had cost (docs/swarm.md).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from shoal.swarm.encoding import GENERATOR_LOGPROB
from shoal.types import Group, Rollout, Sample

Negatives: TypeAlias = Literal["keep", "drop", "weight"]


def weighed_negatives(group: Group, rows: Sequence[Sample], negatives: Negatives) -> tuple[Sample, ...]:
    """The rows of an external group, in the order of its finished rollouts (repeated, if it was padded).

    keep    as they are
    drop    negative advantages become 0; the tokens still count in the loss's denominator
    weight  negative advantages are multiplied with `likelihood_ratio`
    """
    if negatives == "keep":
        return tuple(rows)
    finished = group.finished
    result = []
    for i, row in enumerate(rows):
        factor = 0.0 if negatives == "drop" else likelihood_ratio(finished[i % len(finished)])
        scaled = tuple(a if a >= 0 else a * factor for a in row.advantages)
        result.append(replace(row, advantages=scaled))
    return tuple(result)


def likelihood_ratio(rollout: Rollout) -> float:
    """min(1, exp((l_own - l_generator) / T)): per token of the own encoding, how likely the node would be to say it.

    T is the number of own tokens. A generator without likelihoods (a person, a rule) counts as certain of its text.
    """
    generator = dict(rollout.reward.parts).get(GENERATOR_LOGPROB, 0.0)
    own = math.fsum(lp for turn in rollout.turns for lp in turn.completion.logprobs)
    return math.exp(min(0.0, (own - generator) / max(1, rollout.drawn_tokens)))
