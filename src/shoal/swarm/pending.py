"""Offers wait here for verification, and peers' needs for their use. Bounded.

Established authors and the crowd of newcomers have equal turns.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Collection

from shoal.swarm.offer import Offer, Want
from shoal.swarm.trust import VerifiedMessage

MOST = 512
MOST_PER_AUTHOR = 32
MOST_NEEDY = 512


class PendingOffers:
    """Verified messages with their offers, in order of arrival. Invariant: within the bounds above."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._offers: OrderedDict[str, tuple[VerifiedMessage, Offer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._offers

    def add(self, message: VerifiedMessage, content: Offer) -> list[str]:
        """Adds an offer; returns the authors of offers that had to make room."""
        of_author = [key for key, (one, _) in self._offers.items() if one.peer_id == message.peer_id]
        pushed_out = of_author[:1] if len(of_author) >= MOST_PER_AUTHOR else []
        if not pushed_out and len(self._offers) >= MOST:
            pushed_out = [next(iter(self._offers))]
        authors = [self.pop(key)[0].peer_id for key in pushed_out]
        self._offers[message.id] = (message, content)
        return authors

    def pop(self, message_id: str) -> tuple[VerifiedMessage, Offer]:
        """Removes an offer and returns it."""
        return self._offers.pop(message_id)

    def next(self, is_newcomer: Callable[[str], bool], newcomers: bool) -> str | None:
        """Picks an offer: of an established author about every other time, of `newcomers` only in their turn; None
        without any."""
        known = [key for key, (message, _) in self._offers.items() if not is_newcomer(message.peer_id)]
        new = len(self._offers) - len(known) if newcomers else 0
        if known and (not new or self._rng.random() < 0.5):
            return self._rng.choice(known)
        return self._rng.choice(list(self._offers)) if new else None


class Needs:
    """Latest wants of peers."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[float, Want]] = OrderedDict()

    def update(self, message: VerifiedMessage, want: Want) -> None:
        """Replaces the want of one peer."""
        self._of[message.peer_id] = (message.sent_s, want)
        self._of.move_to_end(message.peer_id)
        if len(self._of) > MOST_NEEDY:
            self._of.popitem(last=False)

    def drop(self, peer_ids: Collection[str]) -> None:
        """Forgets the wants of some peers."""
        for peer_id in self._of.keys() & set(peer_ids):
            del self._of[peer_id]

    def largest(self, since_s: float) -> dict[str, float]:
        """Largest need of each service among wants sent since a Unix time."""
        result: dict[str, float] = {}
        for sent_s, want in self._of.values():
            for service, need in want.needs if sent_s >= since_s else ():
                result[service] = max(result.get(service, 0.0), need)
        return result
