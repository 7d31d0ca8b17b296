"""Offers wait here for verification. Bounded.

Places and turns go by author, so many offers of one author take nothing from the others. Established authors and
newcomers have half of the room each, and equal turns.
"""

import random
from collections import defaultdict
from collections.abc import Callable

from shoal import wire
from shoal.swarm.trust.ingress import VerifiedMessage
from shoal.swarm.wire.offer import Offer

MOST = 256
"""Offers of established authors, and of newcomers."""
MOST_PER_AUTHOR = 32
MOST_BYTES = 16 << 20
"""Encoded bytes of the offers of established authors, and of newcomers; in memory texts take up to four times these."""


class PendingOffers(dict[str, tuple[VerifiedMessage, Offer]]):
    """Verified messages with their offers, by id in order of arrival. Invariant: `add` keeps the bounds above."""

    def __init__(self) -> None:
        super().__init__()
        self._of: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """Ids of each author's offers, oldest first, so that an offer costs no walk through all others."""
        self._bytes: dict[str, int] = {}
        self._said: dict[str, frozenset[int]] = {}
        """Hashes of each offer's answers to its question: joining the texts of long offers again takes seconds."""

    def add(self, message: VerifiedMessage, content: Offer, is_newcomer: Callable[[str], bool]) -> list[str]:
        """Adds an offer; returns the authors of offers that had to make room.

        The author with the most offers makes room, so an author's only offer is never displaced by one with several.
        Of too many bytes the author with the most makes room, so a short offer is never displaced by long ones.
        """
        self[message.id] = (message, content)
        self._bytes[message.id] = len(wire.encode(content))
        self._said[message.id] = frozenset(hash((content.claim.question, one.said)) for one in content.rollouts)
        self._of[message.peer_id][message.id] = None
        crowded_out = list[str]()
        while (author := self._crowding(message.peer_id, is_newcomer)) is not None:
            self.remove(next(iter(self._of[author])))
            crowded_out.append(author)
        return crowded_out

    def _crowding(self, newest: str, is_newcomer: Callable[[str], bool]) -> str | None:
        """Author that makes room after an offer of the `newest`; None while there is room."""
        if len(self._of.get(newest, ())) > MOST_PER_AUTHOR:
            return newest
        if len(self) <= MOST and sum(self._bytes.values()) <= MOST_BYTES:
            return None
        alike = [author for author in self._of if is_newcomer(author) == is_newcomer(newest)]
        sizes = {author: sum(self._bytes[key] for key in self._of[author]) for author in alike}
        if sum(len(self._of[author]) for author in alike) > MOST:
            return max(alike, key=lambda author: len(self._of[author]))
        return max(alike, key=sizes.__getitem__) if sum(sizes.values()) > MOST_BYTES else None

    def remove(self, key: str) -> tuple[VerifiedMessage, Offer]:
        """Removes an offer and returns it. Raises `KeyError`."""
        message, content = self.pop(key)
        del self._said[key], self._bytes[key]
        of_author = self._of[message.peer_id]
        del of_author[key]
        if not of_author:
            del self._of[message.peer_id]
        return message, content

    def next(
        self,
        is_newcomer: Callable[[str], bool],
        newcomers: bool,
        rng: random.Random,
        wanted: Callable[[str], bool] = lambda author: True,
    ) -> str | None:
        """Picks the oldest offer of an author; None without any.

        The author is an established one that is `wanted` about every other time, and a newcomer only in their turn.

        Of offers with the same question and a common answer the first to arrive is picked, since the others may be
        copies.
        """
        known = [author for author in self._of if not is_newcomer(author) and wanted(author)]
        new = [author for author in self._of if is_newcomer(author)] if newcomers else []
        authors = known if known and (not new or rng.random() < 0.5) else new
        if not authors:
            return None
        said = self._said[next(iter(self._of[rng.choice(authors)]))]
        return next(first for first, other in self._said.items() if not other.isdisjoint(said))
