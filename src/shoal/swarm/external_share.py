"""How many of a step's groups are peers': as many as peers supply, fewer while rewards swing. Pure; off by default.

A step trains B groups, I of its own and J = B - I of peers. A node that hears s groups of use for each that it draws
itself can take s for each: I = B / (1 + s). Where all nodes do so, s = (N - 1) rho W (N nodes, a share rho of whose
groups has something to learn from, each of use W times); drawing less would leave too little to take. Measuring s
rather than knowing N, rho and W needs no agreement among nodes, and does not hunt: when peers draw less because they
take more, s stays what it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, variance

import msgspec

SPLIT_FILE = "split.json"
"""Of a node's folder: what the split has come to, for a run that goes on."""
REUSE_CAP = 4
"""Times that one group is counted as supply, however often it may be used: the fifth time teaches little."""
MEMORY = 0.9
"""Of the supply, with every step."""
WINDOW = 20
"""Steps between two looks at how rewards swing, and of each look."""
CALM = 0.12
"""Largest oscillation that is calm. In SAPO's experiment (arXiv 2509.08721) that of 8/0, 6/2 and 4/4 was below .1, that
of 2/6 .156."""
CHANCE = 1.8
"""Times the variance that questions and draws alone would give, up to which rewards are taken for steady: about the 5 %
bound of F with as many degrees of freedom."""


def most_external(groups: int) -> int:
    """Bound on J that leaves a quarter of a step's groups its own.

    >>> most_external(8), most_external(4), most_external(1)
    (6, 3, 0)
    """
    return groups * 3 // 4


@dataclass(frozen=True, slots=True)
class SplitState:
    """What a split remembers of its steps."""

    supply: float
    cap: int
    rewards: tuple[tuple[float, ...], ...]


class AdaptiveSplit:
    """I and J of one node. Invariant: 0 <= external <= most < groups, so that some are always its own."""

    def __init__(self, groups: int, most: int, reuse: int = 1) -> None:
        """Of `groups` up to `most` may be peers', each of them used `reuse` times at most."""
        if not 0 <= most < groups or reuse < 1:
            raise ValueError(f"expected 0 <= most < groups and reuse >= 1, got {most}, {groups}, {reuse}")
        self._groups, self._most, self._uses = groups, most, min(reuse, REUSE_CAP)
        self._supply = 0.0
        self._cap = most
        self._rewards: list[tuple[float, ...]] = []

    @property
    def external(self) -> int:
        """J: groups of peers that the next step wants; the others are its own."""
        own = self._groups / (1 + self._supply * self._uses)
        return min(round(self._groups - own), self._cap)

    def stepped(self, rewards: Sequence[float], heard: float) -> None:
        """A step trained own groups of these mean rewards, one at least; `heard` groups of use came since the last."""
        wanted = self.external
        self._supply = MEMORY * self._supply + (1 - MEMORY) * heard / len(rewards)
        self._rewards.append(tuple(rewards))
        if len(self._rewards) == WINDOW:
            calm = oscillation(self._rewards) <= CALM
            self._cap = min(self._cap + 1, self._most) if calm else max(min(self._cap, wanted) - 1, 0)
            self._rewards = []

    def state(self) -> str:
        """What `restore` goes on from: JSON."""
        return msgspec.json.encode(SplitState(self._supply, self._cap, tuple(self._rewards))).decode()

    def restore(self, text: str) -> None:
        """Goes on from a state; one that cannot be read, or of other settings, counts as far as it fits."""
        try:
            state = msgspec.json.decode(text, type=SplitState)
        except (msgspec.MsgspecError, RecursionError):
            return
        self._supply, self._cap = max(state.supply, 0.0), max(0, min(state.cap, self._most))
        self._rewards = [step for step in state.rewards if step][: WINDOW - 1]


def oscillation(rewards: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the steps' mean rewards about a line, over their mean size, less what chance explains.

    A row per step, with the mean reward of each of its groups; three steps at least. 0 where the steps differ by no
    more than their groups would by themselves.

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
