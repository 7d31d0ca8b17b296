"""The adaptive split sets how many groups of a step are external. Pure; off by default.

A step trains B groups: I own and J = B - I external. A node that receives s useful groups per own group can take s for
each, so I = B / (1 + s). If all nodes do so, s = (N - 1) rho W. N counts nodes, rho is the share of groups with an
advantage, and W the uses of each. Fewer own draws would leave too little to take.

Measuring s needs no agreement among nodes on N, rho and W. It does not oscillate: peers that draw less because they
take more leave s unchanged.

The split takes fewer external groups while rewards swing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, variance

import msgspec

SPLIT_FILE = "split.json"
"""File in a node's folder with the state of the split, for a resumed run."""
REUSE_CAP = 4
"""Uses of a group that count as supply, whatever its limit of uses: a fifth use teaches little."""
MEMORY = 0.9
"""Weight of the past in the measured supply, per step."""
WINDOW = 20
"""Steps in one measurement of the oscillation, and between two of them."""
CALM = 0.12
"""Largest oscillation that counts as calm. In SAPO's experiment (arXiv 2509.08721) it was below .1 for 8/0, 6/2 and
4/4, and .156 for 2/6."""
CHANCE = 1.8
"""Ratio to the variance of chance below which rewards count as steady: about the 5 % bound of F."""


def most_external(groups: int) -> int:
    """Bounds J so that a quarter of a step's groups are own.

    >>> most_external(8), most_external(4), most_external(1)
    (6, 3, 0)
    """
    return groups * 3 // 4


@dataclass(slots=True)
class SplitState:
    """Memory of a split."""

    supply: float
    cap: int
    rewards: list[tuple[float, ...]]


class AdaptiveSplit:
    """I and J of one node. Invariant: 0 <= external <= most < groups, so every step has own groups."""

    def __init__(self, groups: int, most: int, reuse: int = 1) -> None:
        """Up to `most` of `groups` may be external, each used at most `reuse` times."""
        if not 0 <= most < groups or reuse < 1:
            raise ValueError(f"expected 0 <= most < groups and reuse >= 1, got {most}, {groups}, {reuse}")
        self._groups, self._most, self._uses = groups, most, min(reuse, REUSE_CAP)
        self._now = SplitState(0.0, most, [])

    @property
    def external(self) -> int:
        """J: number of external groups in the next step."""
        own = self._groups / (1 + self._now.supply * self._uses)
        return min(round(self._groups - own), self._now.cap)

    def stepped(self, rewards: Sequence[float], heard: float) -> None:
        """Records a step: mean rewards of its own groups, at least one, and the useful groups received since the last
        step."""
        wanted, now = self.external, self._now
        now.supply = MEMORY * now.supply + (1 - MEMORY) * heard / len(rewards)
        now.rewards.append(tuple(rewards))
        if len(now.rewards) == WINDOW:
            calm = oscillation(now.rewards) <= CALM
            now.cap = min(now.cap + 1, self._most) if calm else max(min(now.cap, wanted) - 1, 0)
            now.rewards = []

    def state(self) -> str:
        """JSON for `restore`."""
        return msgspec.json.encode(self._now).decode()

    def restore(self, text: str) -> None:
        """Restores a state; an unreadable state, or one of other settings, applies as far as it fits."""
        try:
            state = msgspec.json.decode(text, type=SplitState)
        except (msgspec.MsgspecError, RecursionError):
            return
        rewards = [step for step in state.rewards if step][: WINDOW - 1]
        self._now = SplitState(max(state.supply, 0.0), max(0, min(state.cap, self._most)), rewards)


def oscillation(rewards: Sequence[Sequence[float]]) -> float:
    """Measures the deviation of the steps' mean rewards from a line, over their mean size, less the part of chance.

    A row per step holds the mean reward of each of its groups; at least three steps. The result is 0 where steps differ
    no more than their groups would by themselves.

    >>> round(oscillation([[0.2, 0.2], [0.8, 0.8]] * 8), 2)
    0.64
    >>> oscillation([[0.1 * step] * 2 for step in range(8)])
    0.0
    """
    means = [fmean(step) for step in rewards]
    slope, start = linear_regression(range(len(means)), means)
    swing = math.fsum((mean - start - slope * i) ** 2 for i, mean in enumerate(means)) / (len(means) - 2)
    chance = fmean([variance(step) / len(step) for step in rewards if len(step) > 1] or [0.0])
    if swing <= max(CHANCE * chance, 1e-12):
        return 0.0
    return math.sqrt(swing - chance) / fmean(abs(reward) for step in rewards for reward in step)
