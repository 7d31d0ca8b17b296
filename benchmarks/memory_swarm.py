"""A swarm inside one process, for benches and tests of many nodes. Deterministic.

It keeps the last frames of each author for late joiners, as a server would. An exchange that is `away` neither
publishes nor receives, as with a cut cable (`here` is cleared). Once back it reads on from its last frame.
"""

import asyncio
from collections import defaultdict, deque
from itertools import islice

from shoal.errors import ExchangeUnavailable
from shoal.swarm.wire.nats import KEPT_PER_AUTHOR, MOST_BEHIND


class MemorySwarm:
    """Frames and exchanges of one swarm. One event loop."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, deque[int]] = defaultdict(deque)
        self.frames: dict[int, bytes] = {}
        self.end = 0
        """Number of the next frame."""
        self._peers: list[MemoryExchange] = []
        self.waiting = set[MemoryExchange]()
        """Exchanges that have read everything: a frame costs nothing for those that have not."""

    def join(self) -> "MemoryExchange":
        """Adds an exchange; it receives all kept frames, its own included."""
        member = MemoryExchange(self)
        self._peers.append(member)
        return member

    def put(self, author: str, frame: bytes) -> None:
        """Delivers a frame to every exchange."""
        kept = self._kept[author]
        kept.append(self.end)
        self.frames[self.end] = frame
        self.end += 1
        if len(kept) > KEPT_PER_AUTHOR:
            del self.frames[kept.popleft()]
        for member in self.waiting:
            member.news.set()
        self.waiting.clear()


class MemoryExchange:
    """One peer's end of a `MemorySwarm`; implements `interfaces.Exchange`."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm = swarm
        self._next = 0
        self.news, self.here = asyncio.Event(), asyncio.Event()
        """Events: a frame arrived; this exchange is connected."""
        self.here.set()

    @property
    def connected(self) -> bool:
        """True unless this exchange is away."""
        return self.here.is_set()

    @property
    def failure(self) -> str:
        """Reason why the swarm cannot be reached; empty if it can."""
        return "" if self.connected else "this peer is cut off"

    async def publish(self, author: str, frame: bytes) -> None:
        """Delivers a frame to every exchange. Raises `ExchangeUnavailable` while this one is away."""
        if not self.connected:
            raise ExchangeUnavailable(self.failure)
        self._swarm.put(author, frame)

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and returns up to `most`, oldest first."""
        while True:
            await self.here.wait()
            if self._swarm.end - self._next > MOST_BEHIND:
                self._next = self._swarm.end - MOST_BEHIND // 2
            numbers = range(self._next, self._swarm.end)
            found = list(islice((number for number in numbers if number in self._swarm.frames), most))
            if found:
                self._next = found[-1] + 1
                return [self._swarm.frames[number] for number in found]
            self.news.clear()
            self._swarm.waiting.add(self)
            await self.news.wait()
