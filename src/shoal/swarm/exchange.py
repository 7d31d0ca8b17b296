"""A swarm inside one process serves tests, simulations and experiments with many nodes. Deterministic.

It keeps the last frames of each author and kind for late joiners, as a server would. An exchange that is `away` neither
publishes nor receives, as with a cut cable. Once back it reads on from its last frame.
"""

import asyncio
from collections import defaultdict, deque

from shoal.errors import ExchangeUnavailable

MOST_BEHIND = 1024
"""Frames of arrears that an exchange reads. One further behind skips to the newest half: old offers are worth little,
and a large swarm sends more than a node can read."""
KEPT_PER_AUTHOR = 128
"""Frames of one author and kind; a flooding author pushes out only its own."""


class MemorySwarm:
    """Frames and exchanges of one swarm. One event loop."""

    def __init__(self, kept_per_author: int = KEPT_PER_AUTHOR) -> None:
        self._kept: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._most = kept_per_author
        self.frames: dict[int, bytes] = {}
        self.end = 0
        """Number of the next frame."""
        self._peers: list[MemoryExchange] = []

    def join(self) -> "MemoryExchange":
        """Adds an exchange; it receives all kept frames, its own included."""
        member = MemoryExchange(self)
        self._peers.append(member)
        return member

    def put(self, kind: str, author: str, frame: bytes) -> None:
        """Delivers a frame to every exchange."""
        kept = self._kept[kind, author]
        kept.append(self.end)
        self.frames[self.end] = frame
        self.end += 1
        if len(kept) > self._most:
            del self.frames[kept.popleft()]
        for member in self._peers:
            member.wake()


class MemoryExchange:
    """One peer's end of a `MemorySwarm`; implements `interfaces.Exchange`."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm = swarm
        self._next = 0
        self._news = asyncio.Event()
        self._away = False

    @property
    def connected(self) -> bool:
        """True unless this exchange is away."""
        return not self._away

    @property
    def failure(self) -> str:
        """Reason why the swarm cannot be reached; empty if it can."""
        return "this member is cut off" if self._away else ""

    @property
    def away(self) -> bool:
        """True while this exchange is cut off."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        self.wake()

    async def publish(self, kind: str, author: str, frame: bytes) -> None:
        """Delivers a frame to every exchange. Raises `ExchangeUnavailable` while this one is away."""
        if self._away:
            raise ExchangeUnavailable(self.failure)
        self._swarm.put(kind, author, frame)

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and returns up to `most`, oldest first."""
        while True:
            if not self._away and (found := self._following(most)):
                return found
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """Wakes the waiting reader."""
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
