"""An exchange inside one process, for tests, simulations and experiments with many nodes. Deterministic.

It keeps what a server would keep: the last frames of each author and kind, for those who join late. A member that is
`away` can neither publish nor receive, as when the network is cut; when it is back it reads on where it stopped.
"""

import asyncio
from collections import defaultdict, deque

from shoal.errors import ExchangeUnavailable

MOST_BEHIND = 1024
"""Frames that a member reads up on; one that is further behind skips to the newest half of these, for old offers are
worth little and in a large swarm there are more of them than anybody can read."""
KEPT_PER_AUTHOR = 128
"""Frames of one author and kind. An author that floods pushes out its own frames and nobody else's."""


class MemorySwarm:
    """What all members of one swarm share. One event loop."""

    def __init__(self, kept_per_author: int = KEPT_PER_AUTHOR) -> None:
        self._kept: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._most = kept_per_author
        self.frames: dict[int, bytes] = {}
        self.end = 0
        """Number of the next frame."""
        self._peers: list[MemoryExchange] = []

    def join(self) -> "MemoryExchange":
        """A new member; it receives what is still kept, its own frames too."""
        member = MemoryExchange(self)
        self._peers.append(member)
        return member

    def put(self, kind: str, author: str, frame: bytes) -> None:
        """Gives a frame to all members."""
        kept = self._kept[kind, author]
        kept.append(self.end)
        self.frames[self.end] = frame
        self.end += 1
        if len(kept) > self._most:
            del self.frames[kept.popleft()]
        for member in self._peers:
            member.wake()


class MemoryExchange:
    """One member's end of a `MemorySwarm`; implements `interfaces.Exchange`."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm = swarm
        self._next = 0
        self._news = asyncio.Event()
        self._away = False

    @property
    def connected(self) -> bool:
        """Whether this member is not away."""
        return not self._away

    @property
    def failure(self) -> str:
        """Why nobody can be reached."""
        return "this member is cut off" if self._away else ""

    @property
    def away(self) -> bool:
        """Whether this member is cut off."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        self.wake()

    async def publish(self, kind: str, author: str, frame: bytes) -> None:
        """Gives a frame to all members. Raises `ExchangeUnavailable` while this one is away."""
        if self._away:
            raise ExchangeUnavailable(self.failure)
        self._swarm.put(kind, author, frame)

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and gives up to `most`, oldest first."""
        while True:
            if not self._away and (found := self._following(most)):
                return found
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """There may be something new."""
        self._news.set()

    def _following(self, most: int) -> list[bytes]:
        found: list[bytes] = []
        if self._swarm.end - self._next > MOST_BEHIND:
            self._next = self._swarm.end - MOST_BEHIND // 2
        while len(found) < most and self._next < self._swarm.end:
            frame = self._swarm.frames.get(self._next)
            if frame is not None:
                found.append(frame)
            self._next += 1
        return found
