"""Ranks of the trainer on other hosts, as the run sees them: an all-or-nothing group of ranks.

Each rank gets its requests over the connection that is its lease, and only its own rows. Ranks meet one another over
TCP. Each writes its rows of a file, and the run puts them in their place. When one leaves, the group is dissolved: the
run goes on from its log, with the next group that is complete.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.cluster.files import FileShelf
from shoal.cluster.registry import Gathered, RankRole
from shoal.errors import ShoalError, WireError, WorkerLost
from shoal.files import sync
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer
from shoal.trainer.messages import answer_from

LOST_FOR_GOOD_S = 600.0
"""Seconds that a run which has lost ranks waits for others, until it goes on with the hosts that are there."""
START_TIMEOUT_S = 300.0
"""Seconds that a rank may take to start its process, which loads nothing yet."""


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """Rank of another host, whose files pass by tickets. Implements `interfaces.Worker`."""

    worker: LeasedWorker
    shelf: FileShelf

    @property
    def ticks(self) -> int:
        """Processor time of the rank, in ticks."""
        return self.worker.ticks

    def place(self, folder: Path) -> str:
        """Ticket of a folder, for which the rank has a path."""
        return self.shelf.ticket(folder)

    async def call(
        self,
        frame: bytes,
        timeout_s: float,
        *,
        concurrent: bool = False,
        fetched: Path | None = None,
        filled: Path | None = None,
    ) -> bytes:
        """Answer to a request, whose files are on the disk; the rank itself knows which calls are concurrent.

        Raises `WorkerLost` and `TimeoutError`.
        """
        with self.shelf.opened(fetched or filled):
            answer = await self.worker.call(frame, timeout_s)
        for path in await asyncio.to_thread(lambda: [*filled.iterdir()] if filled else []):
            await asyncio.to_thread(sync, path)
        try:
            answer_from(answer)
        except WireError as error:  # the run goes on with other ranks
            raise WorkerLost(f"{self.worker.name} answered something else than expected: {error}") from None
        return answer

    async def died(self) -> object:
        """Waits until the rank has left; raises `WorkerLost`."""
        return await self.worker.died()


class RankGroup:
    """The ranks of a trainer that train together."""

    def __init__(
        self,
        count: int,
        per_host: int | None = None,
        shrinks_after_s: float | None = None,
        per_copy: Callable[[int, int], int | None] = lambda ranks, gpu_bytes: None,
    ) -> None:
        """After `shrinks_after_s` the group starts without the hosts that are missing, each of `per_host` ranks.

        `per_copy` gives the number of ranks that share one copy of the weights, None for all, by the number of all
        ranks and the memory of the smallest GPU.
        """
        self._count, self._per_host, self._shrinks_after_s = count, per_host, shrinks_after_s
        self._per_copy = per_copy
        self._members: dict[str, tuple[RankRole, LeasedWorker]] = {}
        self._full = asyncio.Event()
        self._started = False

    @property
    def gpu_bytes(self) -> int:
        """Memory of the smallest GPU of the ranks; 0 if one of them has none."""
        return min((role.gpu_bytes for role, _ in self._members.values()), default=0)

    @asynccontextmanager
    async def _joined(self, role: RankRole, worker: LeasedWorker) -> AsyncIterator[None]:
        """Takes a rank, if one is missing, until it leaves; a group that has started stays full."""
        if role.ranks is not None and role.ranks != self._count:
            raise NotWanted(f"ranks: expected {self._count}, as the run has them, got WORLD_SIZE={role.ranks}")
        if self._full.is_set():
            raise ShoalError(f"the run has all its {self._count} ranks")
        self._members[worker.name] = role, worker
        if len(self._members) == self._count:
            self._full.set()
        try:
            yield
        finally:
            del self._members[worker.name]
            if not self._started:
                self._full.clear()

    @asynccontextmanager
    async def ranks(self, server: RunServer) -> AsyncIterator[Sequence[RemoteRank]]:
        """Waits until all ranks have joined, and starts them; leaving the block ends them. Raises `WorkerLost`."""
        shelf = FileShelf()
        server.open(RankRole, self._joined)
        try:
            with server.added(shelf.routes):
                order = await self._complete()
                self._started = True
                self._full.set()
                first = self._members[order[0]][0]
                workers = [self._members[name][1] for name in order]
                master = f"{first.address}:{first.port}"
                per_copy = self._per_copy(len(order), self.gpu_bytes)
                words = [Gathered(index, len(order), per_copy, master) for index in range(len(order))]
                await asyncio.gather(*map(_started, workers, words))  # its first error, not a group of errors
                yield [RemoteRank(worker, shelf) for worker in workers]
        finally:
            server.close(RankRole)
            for _, worker in self._members.values():
                worker.close()

    async def _complete(self) -> list[str]:
        """Names of the ranks, in order, once all have joined, or the patience with missing hosts has ended."""
        while len(self._members) < self._count:  # a rank may leave before this task runs again
            try:
                async with asyncio.timeout(self._shrinks_after_s):
                    await self._full.wait()
            except TimeoutError:
                hosts = Counter(role.address for role, _ in self._members.values())
                whole = [name for name, (role, _) in self._members.items() if hosts[role.address] >= self._of_host]
                if whole:
                    return sorted(whole, key=self._place)
        return sorted(self._members, key=self._place)

    @property
    def _of_host(self) -> int:
        return self._per_host or 1

    def _place(self, name: str) -> tuple[int, str, int]:
        """Order of a rank: by the number that its launcher gave, else by host and arrival."""
        role, _ = self._members[name]
        return (-1 if role.rank is None else role.rank, role.address, list(self._members).index(name))


async def _started(worker: LeasedWorker, word: Gathered) -> None:
    """Has a rank start its process. Raises `WorkerLost`."""
    try:
        await worker.call(msgspec.json.encode(word), START_TIMEOUT_S)
    except TimeoutError:
        raise WorkerLost(f"{worker.name} has not started its process in {START_TIMEOUT_S:g} s") from None
