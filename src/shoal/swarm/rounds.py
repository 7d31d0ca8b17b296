"""Rounds of a swarm: counts of what peers send, bounded by author. Pure.

A peer counts with as many offers per step as this node has groups, however many it sends.
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
        """Counts an offer of an author, whatever became of it."""
        left = self._left.get(author, self._per_author)
        self._left[author] = max(0, left - 1)
        self._read += left > 0

    @property
    def whole(self) -> bool:
        """Whether all offers of the round were read."""
        return self._read >= self._awaited

    def short(self) -> None:
        """Ends a round without what is missing: a lost group makes one round short, not all that follow."""
        self._awaited = min(self._awaited, self._read)

    def next(self) -> None:
        """Begins the next round."""
        self._awaited += self._offers
        for author, left in self._left.items():
            dict.__setitem__(self._left, author, min(left + self._per_author, 2 * self._per_author))
