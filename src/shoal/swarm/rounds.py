"""Rounds of a swarm: counts of what peers send, bounded by author. Pure.

At most as many offers of one peer count per step as this node has groups.
"""

from shoal.swarm.rates import Recent

MOST_COUNTED = 4096
"""Authors whose offers are counted."""


class Rounds:
    """Rounds of a swarm: one is whole once `offers` more were read."""

    def __init__(self, offers: int, per_author: int) -> None:
        """An author counts with `per_author` offers per round, and with twice as many after a silent one."""
        self._offers, self._per_author = offers, per_author
        self._read, self._awaited = 0, offers
        self._left: Recent[str, int] = Recent(MOST_COUNTED)

    def read(self, author: str) -> None:
        """Counts an offer of an author, accepted or refused."""
        left = self._left.get(author, self._per_author)
        self._left[author] = max(0, left - 1)
        self._read += left > 0

    @property
    def whole(self) -> bool:
        """Whether all offers of the round were read."""
        return self._read >= self._awaited

    def short(self) -> None:
        """Ends a round with offers missing, so a lost group shortens one round and not all later ones."""
        self._awaited = min(self._awaited, self._read)

    def next(self) -> None:
        """Begins the next round."""
        self._awaited += self._offers
        for author, left in self._left.items():
            dict.__setitem__(self._left, author, min(left + self._per_author, 2 * self._per_author))
