"""Ranks of the trainer on other hosts, as the run sees them: an all-or-nothing group of ranks.

Each rank gets its requests over the connection that is its lease, and only its own rows. Ranks meet one another over
TCP. Each writes its rows of a file, and the run puts them in their place. When one leaves, the group is dissolved: the
run goes on from its log, with the next group that is complete.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.cluster.files import FileShelf
from shoal.cluster.registry import Gathered, RankRole
from shoal.errors import ShoalError, WireError
from shoal.files import sync
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer, WorkerLost
from shoal.trainer.messages import answer_from

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
        self, frame: bytes, timeout_s: float, *, fetched: Path | None = None, filled: Path | None = None
    ) -> bytes:
        """Answer to a request, whose files are on the disk. Raises `WorkerLost` and `TimeoutError`."""
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

    def __init__(self, count: int, per_copy: Callable[[int], int | None] = lambda gpu_bytes: None) -> None:
        """`per_copy` gives the number of ranks that share one copy of the weights, None for all, by the memory of the
        smallest GPU."""
        self._count, self._per_copy = count, per_copy
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
                while len(self._members) < self._count:  # a rank may leave before this task runs again
                    await self._full.wait()
                self._started = True
                order = sorted(self._members, key=self._place)
                first = self._members[order[0]][0]
                workers = [self._members[name][1] for name in order]
                master = f"{first.address}:{first.port}"
                per_copy = self._per_copy(self.gpu_bytes)
                words = [Gathered(index, self._count, per_copy, master) for index in range(self._count)]
                await asyncio.gather(*map(_started, workers, words))  # its first error, not a group of errors
                yield [RemoteRank(worker, shelf) for worker in workers]
        finally:
            server.close(RankRole)
            for _, worker in self._members.values():
                worker.close()

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
