"""Offers wait here for verification. Bounded.

Established authors and the crowd of newcomers have equal turns.
"""

import random
from collections.abc import Callable

from shoal.swarm.offer import Offer
from shoal.swarm.trust import VerifiedMessage

MOST = 512
MOST_PER_AUTHOR = 32


class PendingOffers(dict[str, tuple[VerifiedMessage, Offer]]):
    """Verified messages with their offers, by id in order of arrival. Invariant: `add` keeps the bounds above."""

    def add(self, message: VerifiedMessage, content: Offer) -> list[str]:
        """Adds an offer; returns the authors of offers that had to make room."""
        of_author = [key for key, (one, _) in self.items() if one.peer_id == message.peer_id]
        pushed_out = of_author[:1] if len(of_author) >= MOST_PER_AUTHOR else []
        if not pushed_out and len(self) >= MOST:
            pushed_out = [next(iter(self))]
        authors = [self.pop(key)[0].peer_id for key in pushed_out]
        self[message.id] = (message, content)
        return authors

    def next(self, is_newcomer: Callable[[str], bool], newcomers: bool, rng: random.Random) -> str | None:
        """Picks an offer: of an established author about every other time, of `newcomers` only in their turn; None
        without any."""
        known = [key for key, (message, _) in self.items() if not is_newcomer(message.peer_id)]
        new = len(self) - len(known) if newcomers else 0
        if known and (not new or rng.random() < 0.5):
            return rng.choice(known)
        return rng.choice(list(self)) if new else None
