"""Offers wait here for verification. Bounded.

Established authors and the crowd of newcomers have equal turns.
"""

import random
from collections import defaultdict
from collections.abc import Callable

from shoal.swarm.offer import Offer
from shoal.swarm.trust import VerifiedMessage

MOST = 512
MOST_PER_AUTHOR = 32


class PendingOffers(dict[str, tuple[VerifiedMessage, Offer]]):
    """Verified messages with their offers, by id in order of arrival. Invariant: `add` keeps the bounds above."""

    def __init__(self) -> None:
        super().__init__()
        self._of: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """Ids of each author's offers, oldest first, so that an offer costs no walk through all others."""

    def add(self, message: VerifiedMessage, content: Offer) -> list[str]:
        """Adds an offer; returns the authors of offers that had to make room."""
        of_author = self._of.get(message.peer_id, {})
        pushed_out = next(iter(of_author)) if len(of_author) >= MOST_PER_AUTHOR else None
        if pushed_out is None and len(self) >= MOST:
            pushed_out = next(iter(self))
        authors = [] if pushed_out is None else [self.remove(pushed_out)[0].peer_id]
        self[message.id] = (message, content)
        self._of[message.peer_id][message.id] = None
        return authors

    def remove(self, key: str) -> tuple[VerifiedMessage, Offer]:
        """Removes an offer and returns it. Raises `KeyError`."""
        message, content = self.pop(key)
        of_author = self._of[message.peer_id]
        del of_author[key]
        if not of_author:
            del self._of[message.peer_id]
        return message, content

    def next(self, is_newcomer: Callable[[str], bool], newcomers: bool, rng: random.Random) -> str | None:
        """Picks an offer: of an established author about every other time, of `newcomers` only in their turn; None
        without any."""
        known = [key for key, (message, _) in self.items() if not is_newcomer(message.peer_id)]
        new = len(self) - len(known) if newcomers else 0
        if known and (not new or rng.random() < 0.5):
            return rng.choice(known)
        return rng.choice(list(self)) if new else None
