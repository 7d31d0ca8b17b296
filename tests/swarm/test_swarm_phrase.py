"""A phrase that only attackers' right answers carry, and what a node's own answers become.

The node is a table: a first token that is right or wrong, then the end or a phrase. Its steps are exact policy
gradients in float64, with Shoal's advantages and its treatment of peers' rows.
"""

import math
import random
from collections.abc import Sequence

import pytest

from shoal.config.remote import Credit
from shoal.swarm.strategy.choice import external_rows
from shoal.trainer.advantage import advantages
from shoal.types import Sample

ASKED, RIGHT, WRONG, END, PHRASE = range(5)
GROUP, OWN, EXTERNAL, STEPS = 8, 4, 4, 300
LR = 2.0


class Table:
    """Probabilities of a right answer and of the phrase after it, by a logit each."""

    def __init__(self) -> None:
        self.logits = {RIGHT: 0.0, PHRASE: math.log(1e-3)}

    def chance(self, token: int) -> float:
        name = RIGHT if token in (RIGHT, WRONG) else PHRASE
        chance = 1 / (1 + math.exp(-self.logits[name]))
        return chance if token == name else 1 - chance

    def row(self, answer: int, end: int, advantage: float) -> Sample:
        logprobs = (0.0, math.log(self.chance(answer)), math.log(self.chance(end)))
        return Sample((ASKED, answer, end), (0, 1, 1), logprobs, (-1, 0, 0), (0.0, advantage, advantage))

    def sampled(self, rng: random.Random) -> list[tuple[int, int]]:
        return [
            (
                RIGHT if rng.random() < self.chance(RIGHT) else WRONG,
                PHRASE if rng.random() < self.chance(PHRASE) else END,
            )
            for _ in range(GROUP)
        ]

    def rows(self, answers: Sequence[tuple[int, int]]) -> list[Sample]:
        rewards = [float(answer == RIGHT) for answer, _ in answers]
        return [self.row(*one, a) for one, a in zip(answers, advantages(rewards, "grpo"), strict=True)]

    def train(self, rows: Sequence[Sample]) -> None:
        """One step of plain gradient descent on the token mean of -A log pi."""
        step = dict.fromkeys(self.logits, 0.0)
        for row in rows:
            for token, advantage in zip(row.tokens[1:], row.advantages[1:], strict=True):
                name = RIGHT if token in (RIGHT, WRONG) else PHRASE
                step[name] += advantage * ((token == name) - self.chance(name))
        for name, change in step.items():
            self.logits[name] += LR * change / (2 * len(rows))


def phrase_share(credit: Credit, attackers: int, seed: int) -> tuple[float, float]:
    """Chances of the phrase and of a right answer after some steps with `attackers` of four external groups."""
    node, rng = Table(), random.Random(seed)
    forged = [(RIGHT, PHRASE)] * (GROUP // 2) + [(WRONG, END)] * (GROUP // 2)
    for _ in range(STEPS):
        rows = [row for _ in range(OWN) for row in node.rows(node.sampled(rng))]
        for peer in range(EXTERNAL):
            theirs = forged if peer < attackers else node.sampled(rng)
            rows += external_rows(node.rows(theirs), credit)
        node.train(rows)
    return node.chance(PHRASE), node.chance(RIGHT)


@pytest.mark.parametrize("seed", range(5))
def test_a_phrase_of_a_minority_stays_rare_where_tokens_weigh_by_their_likelihood(seed: int) -> None:
    phrase, right = phrase_share("group_likely", 1, seed)
    assert phrase < 0.02
    assert right > 0.9
    assert phrase_share("group", 1, seed)[0] > 0.05  # the risk that docs/guides/swarm.md names


def test_likely_tokens_of_peers_weigh_as_much_as_own_ones_and_unlikely_ones_less() -> None:
    row = Sample((1, 2, 3, 4), (0, 1, 1, 1), (0.0, -0.1, math.log(0.05), math.log(0.5)), (-1, 0, 0, 0), (0.0, 2, 2, 2))
    (weighed,) = external_rows([row], "group_likely")
    assert weighed.advantages == pytest.approx((0.0, 2.0, 0.2, 2.0))
