"""Verified offers wait here for the steps that train them. Bounded, by author.

When the pool is full, the author with the most offers makes room with its oldest. Newcomers have a small room of their
own, in which the newest come in: they are verified for their record's sake too, so a crowd delays no other record.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection

from shoal.swarm.strategy.choice import Candidate, Taker, apply_taker
from shoal.swarm.trust.encoding import ReadyOffer
from shoal.swarm.trust.rates import Recent

NEWCOMERS_READY = 8
"""Verified offers of newcomers."""
MOST_USERS = 1 << 14
"""Authors with a count of uses; the count of an author that was not taken for longest is forgotten."""


class ReadyPool:
    """Offers that a step may take, and how often each author was taken."""

    def __init__(self, most: int, is_newcomer: Callable[[str], bool], most_users: int = MOST_USERS) -> None:
        """Up to `most` offers of established authors are kept."""
        self._most, self.is_newcomer = most, is_newcomer
        self.offers: list[ReadyOffer] = []
        self.uses: Recent[str, int] = Recent(most_users)
        """Groups taken of each author."""

    def __len__(self) -> int:
        return len(self.offers)

    def wants(self, author: str) -> bool:
        """Whether an offer of an author would come in, and make room at most for a fairer share."""
        counts = self._counts(self.is_newcomer(author))
        return counts.total() < self._room(author) or counts[author] + 1 < max(counts.values(), default=0)

    def add(self, ready: ReadyOffer) -> None:
        """Adds an offer; the oldest of the author with the most in its room makes room."""
        author = ready.message.peer_id
        newcomer = self.is_newcomer(author)
        counts = self._counts(newcomer)
        if counts.total() >= self._room(author):
            largest = max(counts.values(), default=0)
            oldest = next(
                one
                for one in self.offers
                if self.is_newcomer(one.message.peer_id) == newcomer and counts[one.message.peer_id] == largest
            )
            self.offers.remove(oldest)
        self.offers.append(ready)

    def drop(self, before_s: float, banned: Collection[str]) -> list[str]:
        """Drops offers sent before a time or of banned authors; returns the authors of stale ones never used."""
        stale = [one.message.peer_id for one in self.offers if one.message.sent_s < before_s and not one.uses]
        self.offers = [
            one for one in self.offers if one.message.sent_s >= before_s and one.message.peer_id not in banned
        ]
        return stale

    def choose(
        self, taker: Taker, n: int, rng: random.Random, trust: Callable[[str], float], *, now_s: float, reuse: int
    ) -> list[ReadyOffer]:
        """Chooses up to `n` offers by the taker, counts their use, and keeps the offers used less than `reuse` times.

        `now_s` is Unix time.
        """
        candidates = [
            Candidate(
                peer_id=(peer_id := ready.message.peer_id),
                service=ready.source.task.service,
                rewards=tuple(reward.value for reward in ready.rewards),
                age_s=max(0.0, now_s - ready.message.sent_s),
                uses=ready.uses,
                author_uses=self.uses.get(peer_id, 0),
                trust=trust(peer_id),
                newcomer=self.is_newcomer(peer_id),
            )
            for ready in self.offers
        ]
        chosen = [self.offers[i] for i in apply_taker(taker, candidates, n, rng)]
        for ready in chosen:
            ready.uses += 1
            self.uses[ready.message.peer_id] = self.uses.get(ready.message.peer_id, 0) + 1
        self.offers = [one for one in self.offers if one.uses < reuse]
        return chosen

    def _room(self, author: str) -> int:
        return NEWCOMERS_READY if self.is_newcomer(author) else self._most

    def _counts(self, newcomers: bool) -> Counter[str]:
        authors = (one.message.peer_id for one in self.offers)
        return Counter(author for author in authors if self.is_newcomer(author) == newcomers)
