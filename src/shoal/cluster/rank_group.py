"""Ranks of the trainer on other hosts, as the run sees them: an all-or-nothing group of ranks.

Each rank gets its requests over the connection that is its lease, and only its own rows. Ranks meet one another over
TCP. Each writes its rows of a file, and the run puts them in their place. When one leaves, the group is dissolved: the
run goes on from its log, with the next group that is complete.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal import wire
from shoal.cluster.files import FileShelf
from shoal.cluster.registry import Gathered, RankRole
from shoal.errors import ShoalError
from shoal.files import sync
from shoal.net.joining import RunRole
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer
from shoal.trainer.messages import (
    ANSWER_TIMEOUT_S,
    Answer,
    LoadCheckpoint,
    Open,
    Request,
    SaveCheckpoint,
    StartTrainer,
    Step,
    WriteVersion,
    answer_from,
)


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """Rank of another host. Implements `trainer.worker.Rank`."""

    worker: LeasedWorker
    shelf: FileShelf

    @property
    def ticks(self) -> int:
        """Processor time of the rank, in ticks."""
        return self.worker.ticks

    async def died(self) -> str:
        """Waits until the rank has left; raises `WorkerLost`."""
        return await self.worker.died()

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Answer to a request, whose files are on the disk. Raises `WorkerLost` and `TimeoutError`."""
        with ExitStack() as stack:
            sent, folder = self._without_paths(request, stack)
            frame = await asyncio.to_thread(wire.encode, sent)
            answer = answer_from(await self.worker.call(frame, timeout_s))
            if folder is not None:
                for path in await asyncio.to_thread(lambda: list(folder.iterdir())):
                    await asyncio.to_thread(sync, path)
            return answer

    def _without_paths(self, request: Request, stack: ExitStack) -> tuple[Request, Path | None]:
        """Request with tickets in place of paths, and the folder into which files come."""
        changed = msgspec.structs.replace
        match request:
            case StartTrainer() | Open():
                return changed(request, model_path=""), None
            case Step():  # the file with each token's numbers is for ranks of the run's host
                return changed(request, tokens_file=None), None
            case WriteVersion(str(path)):
                ticket = stack.enter_context(self.shelf.ticket(Path(path).parent))
                return changed(request, path=f"{ticket}/{Path(path).name}"), Path(path).parent
            case SaveCheckpoint(directory):
                ticket = stack.enter_context(self.shelf.ticket(Path(directory)))
                return changed(request, directory=ticket), Path(directory)
            case LoadCheckpoint(directory):
                return changed(request, directory=stack.enter_context(self.shelf.ticket(Path(directory)))), None
        return request, None


class RankGroup:
    """Handler of the ranks of a trainer."""

    def __init__(self, count: int, per_host: int | None = None) -> None:
        """`per_host` ranks of each host shard the weights among them; None shards over all ranks."""
        self._count, self._per_host = count, per_host
        self._members: dict[str, tuple[RankRole, LeasedWorker]] = {}
        self._full = asyncio.Event()
        self._started = False

    async def join(self, name: str, role: RunRole, worker: LeasedWorker) -> None:
        """Takes a rank, if one is missing."""
        assert isinstance(role, RankRole)
        if role.ranks is not None and role.ranks != self._count:
            raise NotWanted(f"ranks: expected {self._count}, as the run has them, got WORLD_SIZE={role.ranks}")
        if self._full.is_set():
            raise ShoalError(f"the run has all its {self._count} ranks")
        self._members[name] = role, worker
        if len(self._members) == self._count:
            self._full.set()

    async def leave(self, name: str) -> None:
        """Notes that a rank has left; a group that has started stays full."""
        self._members.pop(name, None)
        if not self._started:
            self._full.clear()

    @asynccontextmanager
    async def ranks(self, server: RunServer) -> AsyncIterator[Sequence[RemoteRank]]:
        """Waits until all ranks have joined, and starts them; leaving the block ends them. Raises `WorkerLost`."""
        shelf = FileShelf()
        server.open(RankRole, self)
        try:
            with server.added(shelf.routes):
                await self._full.wait()
                self._started = True
                order = sorted(self._members, key=self._place)
                first = self._members[order[0]][0]
                workers = [self._members[name][1] for name in order]
                async with asyncio.TaskGroup() as tasks:
                    for index, worker in enumerate(workers):
                        word = Gathered(index, self._count, self._per_host, f"{first.address}:{first.port}")
                        tasks.create_task(worker.call(msgspec.json.encode(word), ANSWER_TIMEOUT_S))
                yield [RemoteRank(worker, shelf) for worker in workers]
        finally:
            server.close(RankRole)
            for _, worker in self._members.values():
                worker.close()

    def _place(self, name: str) -> tuple[int, str, int]:
        """Order of a rank: by the number that its launcher gave, else by host and arrival."""
        role, _ = self._members[name]
        return (-1 if role.rank is None else role.rank, role.address, list(self._members).index(name))
