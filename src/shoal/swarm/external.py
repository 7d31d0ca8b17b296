"""Credit rules set how peers' answers are reinforced: against their group or against this node's own skill. Pure.

The gradient of a worse external answer pushes down text that this node might never write. At tiny scale this hurt
specialists, and dropping such answers recovered the cost of sharing (docs/guides/swarm.md). Every weight is computed
from this node's own records: a peer chooses texts, never their weight.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from shoal.config import Credit
from shoal.types import External, Group, Reward, Rollout, Sample

NEED_DECAY = 0.95
"""Weight of the past in the mean reward and mean logprob of a task, per own group."""
LEAST_DEVIATION = 0.25
"""Smallest deviation to divide by, for a skill near 0 or 1: no single answer weighs more than four."""


def external_rows(group: Group, rows: Sequence[Sample], credit: Credit) -> tuple[Sample, ...]:
    """Builds the rows of an external group, in the order of its finished rollouts, with repeats if it was padded.

    Advantages are relative to the node's own skill where the group stores one (`skill_advantage`). Two suffixes of
    `credit` change the negative advantages:

        *_drop    leaves them out; their tokens still count in the loss's denominator
        *_weight  multiplies them with `own_likelihood`

    """
    finished = group.finished
    return tuple(_weighed(row, finished[i % len(finished)], credit) for i, row in enumerate(rows))


def _weighed(row: Sample, rollout: Rollout, credit: Credit) -> Sample:
    advantages = row.advantages
    if rollout.external is not None and rollout.external.skill is not None:
        against = skill_advantage(rollout.reward.value, rollout.external.skill)
        advantages = tuple(against if sampled else 0.0 for sampled in row.mask)
    if credit.endswith(("_drop", "_weight")):
        factor = 0.0 if credit.endswith("_drop") else own_likelihood(rollout)
        advantages = tuple(a if a >= 0 else a * factor for a in advantages)
    return replace(row, advantages=advantages)


def skill_advantage(reward: float, skill: float) -> float:
    """Computes (r - b) / max(sqrt(b (1 - b)), 0.25), where b is this node's mean reward in such tasks.

    It needs no group: a single right answer teaches a node that is mostly wrong.

    >>> skill_advantage(1.0, 0.0), skill_advantage(1.0, 0.5), skill_advantage(0.5, 0.5)
    (4.0, 1.0, 0.0)
    """
    return (reward - skill) / max(math.sqrt(max(skill * (1 - skill), 0.0)), LEAST_DEVIATION)


def own_likelihood(rollout: Rollout) -> float:
    """Computes min(1, exp(l / T - u)): the text's likelihood per token, relative to this node's own samples.

    l is the log-likelihood (nats) of the T tokens under the node; u is the mean logprob per token of its own samples.
    """
    own = math.fsum(lp for turn in rollout.turns for lp in turn.completion.logprobs)
    usual = 0.0 if rollout.external is None else rollout.external.usual_logprob
    return math.exp(min(0.0, own / max(1, rollout.sampled_tokens) - usual))


class OwnRecord:
    """A node's means over its own groups, by task: what peers' answers are compared with."""

    def __init__(self, credit: Credit) -> None:
        self.rewards: dict[str, float] = {}
        """Mean reward of each task."""
        self._logprobs: dict[str, float] = {}  # nats per token sampled here, of each task
        self._by_skill, self._drops = credit.startswith("skill"), credit.endswith("_drop")

    def add(self, group: Group) -> None:
        """Adds a finished own group."""
        service, rewards = group.task.service, [rollout.reward.value for rollout in group.finished]
        if rewards:
            _average(self.rewards, service, fmean(rewards))
        sampled = [lp for rollout in group.finished for turn in rollout.turns for lp in turn.completion.logprobs]
        if sampled:
            _average(self._logprobs, service, fmean(sampled))

    def skill(self, service: str) -> float | None:
        """Mean own reward in a service's tasks, if `credit` compares with it; 0.5 before any."""
        return self.rewards.get(service, 0.5) if self._by_skill else None

    def external(self, service: str) -> External:
        """Own record of a service's tasks; the logprob is the mean of all tasks where the service has none."""
        usual = self._logprobs.get(service, fmean(self._logprobs.values()) if self._logprobs else 0.0)
        return External(self.skill(service), usual)

    def compared(self, service: str, rewards: Sequence[Reward]) -> tuple[float, ...]:
        """Rewards to test for variance: the group's, plus this node's mean reward when `credit` compares with it."""
        skill = self.skill(service)
        return (*(reward.value for reward in rewards), *(() if skill is None else (skill,)))

    def teaches(self, service: str, rewards: Sequence[Reward]) -> bool:
        """Tells whether answers with such rewards have an advantage that `credit` does not drop."""
        compared, skill = self.compared(service, rewards), self.skill(service)
        return max(compared) > (min(compared) if skill is None or not self._drops else skill)


def _average(means: dict[str, float], service: str, value: float) -> None:
    means[service] = NEED_DECAY * means.get(service, value) + (1 - NEED_DECAY) * value
