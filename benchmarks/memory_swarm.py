"""A swarm inside one process, for benches and tests of many nodes. Deterministic.

It keeps the last frames of each author for late joiners, as a server would. An exchange that is `away` neither
publishes nor receives, as with a cut cable (`here` is cleared). Once back it reads on from its last frame.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from shoal.errors import ExchangeUnavailable
from shoal.swarm.wire.nats import FETCH_TIMEOUT_S, KEPT_PER_AUTHOR, MOST_BEHIND


class MemorySwarm:
    """Frames and exchanges of one swarm. One event loop."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, deque[int]] = defaultdict(deque)
        self.frames: dict[int, tuple[str, bytes]] = {}
        """Names and frames, by number."""
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
        self.frames[self.end] = author, frame
        self.end += 1
        if len(kept) > KEPT_PER_AUTHOR:
            del self.frames[kept.popleft()]
        for member in self.waiting:
            member.news.set()
        self.waiting.clear()

    def kept(self, authors: frozenset[str], first: int) -> Iterator[int]:
        """Numbers of the kept frames of some authors, from `first` on."""
        yield from sorted(number for author in authors for number in self._kept.get(author, ()) if number >= first)


class MemoryExchange:
    """One peer's end of a `MemorySwarm`; implements `interfaces.Exchange`."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm = swarm
        self._next = self._next_followed = 0
        self._followed = frozenset[str]()
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
        frames = self._swarm.frames
        while True:
            await self.here.wait()
            if self._swarm.end - self._next > MOST_BEHIND:
                self._next = self._swarm.end - MOST_BEHIND // 2
            numbers = range(self._next, self._swarm.end)
            others = (number for number in numbers if number in frames and frames[number][0] not in self._followed)
            found = list(islice(others, most))
            self._next = found[-1] + 1 if found else self._swarm.end
            if found:
                return [frames[number][1] for number in found]
            await self._news()

    async def _news(self) -> None:
        self.news.clear()
        self._swarm.waiting.add(self)
        await self.news.wait()

    async def receive_from(self, authors: frozenset[str], most: int) -> list[bytes]:
        """Returns frames under the names of `authors`, up to `most`; waits a moment without any."""
        if authors != self._followed:
            self._followed, self._next_followed = authors, min(self._next, self._next_followed)
        found = list(islice(self._swarm.kept(authors, self._next_followed), most)) if self.connected else []
        if not found:
            with suppress(TimeoutError):
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    await self._news()
            return []
        self._next_followed = found[-1] + 1
        return [self._swarm.frames[number][1] for number in found]
