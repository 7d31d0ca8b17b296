"""Picks the service whose group starts next, so that each task has its share of training. Pure: no I/O, no clock.

Shares are over usable groups, never over started groups: a slow task runs more at once, a flaky task starts more often.
Both reach their share (GLM-5, arXiv 2602.15763, section 4.1.1).
"""

import random
from collections.abc import Collection, Mapping

REPAID = 0.5
"""Share of any growth, at most, that repays tasks that were away."""


class Quotas:
    """Splits the budget of the staleness gate among task services.

    The gate lets `budget` groups, all in all, be accepted or running. Each service has a quota of it, and starts a
    group only while `accepted + running < quota`. The quotas sum to the budget, so whenever the gate has room some
    service present has room as well; as they only grow with the budget, a service is never further ahead of its share
    than the budget is ahead of training, plus one group. What a failed or dropped group took is free again at once,
    so deficits carry over by themselves.

    With an `rng` each group of the budget goes to one service by chance, with its share as the probability (SAPO, arXiv
    2509.08721: specialties are drawn uniformly with replacement).

    A service that is away lends the others its part, and gets it back afterwards, out of at most half of the growth,
    up to `lend_at_most` groups: without a bound, a task that was away for a day would rule the next one.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        lend_at_most: float,
        consumed: Mapping[str, int] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Weights are relative; all services are present at first. `consumed` is what a resumed run has trained."""
        if not weights or min(weights.values()) <= 0:
            raise ValueError(f"weights: expected a number > 0 for each of one or more tasks, got {dict(weights)}")
        self._weights = dict(weights)
        self._quotas = {name: float((consumed or {}).get(name, 0)) for name in weights}
        self._present = dict.fromkeys(weights)  # in order
        self._lent = dict.fromkeys(weights, 0.0)
        self._lend_at_most = lend_at_most
        self._budget = sum(self._quotas.values())
        self._rng, self._undrawn = rng, 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of each present service; the shares sum to 1."""
        total = sum(self._weights[name] for name in self._present)
        return {name: self._weights[name] / total for name in self._present}

    def quota(self, name: str) -> float:
        """Number of groups that a service may have had accepted or running since the run began."""
        return self._quotas[name]

    def grow(self, budget: float) -> None:
        """The gate allows `budget` groups in all now; never fewer than before. It is split once somebody is there."""
        growth = budget - self._budget
        if growth > 0 and self._present:
            self._budget = budget
            self._lend(growth)
            self._split(growth - self._repay(growth * REPAID))

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Uses other weights from now on; what was given stays given."""
        assert weights.keys() == self._weights.keys() and min(weights.values()) > 0
        self._weights = dict(weights)

    def leave(self, name: str) -> None:
        """A service is away: the others take over what it has not used, and does not use any more."""
        self._present.pop(name, None)

    def come(self, name: str) -> None:
        """Notes that a service is there, again or for the first time under a name that has a weight."""
        self._present[name] = None

    def next(self, taken: Mapping[str, int], ready: Collection[str]) -> str | None:
        """The service among `ready` that starts a group next: the one furthest below its quota; None when none is.

        `taken` is the number of accepted and running groups of each service: consumed, waiting, or under way.
        """
        for away in [name for name in self._weights if name not in self._present]:
            self._take_over(away, self._quotas[away] - taken[away])
        room = {name: self._quotas[name] - taken[name] for name in self._present if name in ready}
        name = max(room, key=lambda name: room[name], default=None)
        return name if name is not None and room[name] > 1e-9 else None

    def due(self, consumed: Mapping[str, int], groups: int) -> dict[str, float]:
        """Number of groups of each present service that may have been consumed after `groups` more.

        The number is the service's quota, less its share of the quotas' lead over consumption. The deficits of
        consumption are the quotas' deficits, so each due group is there, or may be started.
        """
        ahead = sum(self._quotas[name] - consumed.get(name, 0) for name in self._present) - groups
        return {name: self._quotas[name] - share * ahead for name, share in self.shares.items()}

    def _take_over(self, name: str, unused: float) -> None:
        """Gives what a service that is away does not use to the others."""
        if unused <= 0 or not self._present:
            return
        self._quotas[name] -= unused
        self._lent[name] = min(self._lent[name] + unused, self._lend_at_most)
        self._split(unused)

    def _split(self, growth: float) -> None:
        if self._rng is None:
            for name, share in self.shares.items():
                self._quotas[name] += share * growth
            return
        groups, self._undrawn = divmod(self._undrawn + growth + 1e-9, 1)
        for name in self._rng.choices([*self.shares], [*self.shares.values()], k=int(groups)):
            self._quotas[name] += 1

    def _lend(self, growth: float) -> None:
        """Notes what those who are away would have been given."""
        total = sum(self._weights.values())
        for name in self._weights.keys() - self._present.keys():
            missed = growth * self._weights[name] / total
            self._lent[name] = min(self._lent[name] + missed, self._lend_at_most)

    def _repay(self, most: float) -> float:
        """Gives back up to `most` groups to services that lent some, and returns their number."""
        owed = {name: self._lent[name] for name in self._present if self._lent[name] > 0}
        repaid = min(most, sum(owed.values()))
        for name, lent in owed.items():
            part = repaid * lent / sum(owed.values())
            self._lent[name] -= part
            self._quotas[name] += part
        return repaid
