"""Ranks of the trainer on other hosts, as the run sees them: a gang, of which all are there or none is used.

Each rank gets its requests over the connection that is its lease, and its own rows only. Ranks meet one another over
TCP. Each writes the rows of a file that it has, and they come to the run, to their place there. When one leaves, the
gang is dissolved: the run goes on from its log, with the next gang that is complete.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal import wire
from shoal.cluster.files import FileShelf
from shoal.cluster.registry import Gathered, NotWanted, RankRole, Role, RoleLine
from shoal.errors import ChildDied, ShoalError
from shoal.files import sync
from shoal.trainer.messages import (
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

NUMBER = struct.Struct(">Q")
"""Before each binary message: the number of the request; 0 is followed by the processor time of the rank."""


class RankLost(ChildDied):
    """A rank of another host has left: the run can go on from its log with another one."""


class RemoteRank:
    """Rank of another host. Implements `trainer.worker.Rank`."""

    def __init__(self, name: str, line: RoleLine, shelf: FileShelf) -> None:
        self._name, self._line, self._shelf = name, line, shelf
        self._asked, self.ticks = 0, 0
        self._answer: asyncio.Future[bytes] | None = None
        self._lost = asyncio.Event()

    def lost(self) -> None:
        """Records that the rank has left."""
        self._lost.set()

    async def died(self) -> str:
        """Waits until the rank has left; raises `RankLost`, after which the run can go on."""
        await self._lost.wait()
        raise RankLost(f"{self._name} has left; the run goes on from its log when all ranks are there again")

    async def listen(self) -> None:
        """Takes the messages of the rank, for ever."""
        while True:
            message = await self._line.messages.get()
            (number,) = NUMBER.unpack(message[: NUMBER.size])
            if number == 0:
                (self.ticks,) = NUMBER.unpack(message[NUMBER.size :])
            elif number == self._asked and self._answer is not None and not self._answer.done():
                self._answer.set_result(message[NUMBER.size :])

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Answer to a request, whose files have come. Raises `RankLost` and `TimeoutError`."""
        with ExitStack() as stack:
            sent, folder = self._without_paths(request, stack)
            return answer_from(await self._exchanged(await asyncio.to_thread(wire.encode, sent), folder, timeout_s))

    async def _exchanged(self, frame: bytes, folder: Path | None, timeout_s: float) -> bytes:
        """Frame of an answer, once the files in `folder` that came with it are on the disk."""
        self._asked += 1
        self._answer = asyncio.get_running_loop().create_future()
        await self._line.send(NUMBER.pack(self._asked) + frame)
        lost = asyncio.create_task(self._lost.wait(), name=f"loss of {self._name}")
        lost.add_done_callback(lambda _: self._answer and self._answer.cancel())
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answer
        except asyncio.CancelledError:
            if self._lost.is_set():
                await self.died()
            raise
        finally:
            lost.cancel()
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
                ticket = stack.enter_context(self._shelf.ticket(Path(path).parent))
                return changed(request, path=f"{ticket}/{Path(path).name}"), Path(path).parent
            case SaveCheckpoint(directory):
                ticket = stack.enter_context(self._shelf.ticket(Path(directory)))
                return changed(request, directory=ticket), Path(directory)
            case LoadCheckpoint(directory):
                return changed(request, directory=stack.enter_context(self._shelf.ticket(Path(directory)))), None
        return request, None


@dataclass(frozen=True, slots=True)
class _Member:
    role: RankRole
    line: RoleLine


class Gang:
    """Handler of the ranks of a trainer."""

    def __init__(self, count: int, per_host: int | None, shelf: FileShelf) -> None:
        """`per_host` ranks of each host shard the weights among them; None shards over all ranks."""
        self._count, self._per_host, self._shelf = count, per_host, shelf
        self._members: dict[str, _Member] = {}
        self._ranks: dict[str, RemoteRank] = {}
        self._full = asyncio.Event()

    async def join(self, name: str, role: Role, line: RoleLine) -> None:
        """Takes a rank, if one is missing."""
        assert isinstance(role, RankRole)
        if role.ranks is not None and role.ranks != self._count:
            raise NotWanted(f"ranks: expected {self._count}, as the run has them, got WORLD_SIZE={role.ranks}")
        if self._full.is_set():
            raise ShoalError(f"the run has all its {self._count} ranks")
        self._members[name] = _Member(role, line)
        if len(self._members) == self._count:
            self._full.set()

    async def leave(self, name: str) -> None:
        """Notes that a rank is gone."""
        self._members.pop(name, None)
        if name in self._ranks:
            self._ranks[name].lost()
        elif len(self._members) < self._count:
            self._full.clear()

    @asynccontextmanager
    async def ranks(self) -> AsyncIterator[Sequence[RemoteRank]]:
        """Waits until all ranks are there, and starts them; leaving the block ends them."""
        await self._full.wait()
        order = sorted(self._members, key=self._place)
        first = self._members[order[0]].role
        try:
            async with asyncio.TaskGroup() as tasks:
                listening = []
                for index, name in enumerate(order):
                    line = self._members[name].line
                    rank = self._ranks[name] = RemoteRank(name, line, self._shelf)
                    listening.append(tasks.create_task(rank.listen(), name=f"messages of {name}"))
                    word = Gathered(index, self._count, self._per_host, f"{first.address}:{first.port}")
                    await line.send(msgspec.json.encode(word))
                yield [self._ranks[name] for name in order]
                for task in listening:
                    task.cancel()
        finally:
            for member in list(self._members.values()):
                await member.line.close()

    def _place(self, name: str) -> tuple[int, str, int]:
        """Order of a rank: by the number that its launcher gave, else by host and arrival."""
        role = self._members[name].role
        return (-1 if role.rank is None else role.rank, role.address, list(self._members).index(name))
