"""`shoal trainer join`: a rank of the trainer on this host, for a run of another.

    the run  <--lease, requests, answers--  this process  --socket-->  python -m shoal.trainer.worker
                                                                          '--TCP--> the other ranks

The model, checkpoints and Versions pass as files into and out of a temporary folder of this host.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from shoal import wire
from shoal.cluster.files import NAME, fetch_heads, fetch_ranges, send_files
from shoal.cluster.registry import Gathered, OtherRun, RankRole, first_info, run_info
from shoal.errors import ChildDied, EngineUnavailable, ShoalError, TrainerError, WireError
from shoal.net.client import Client
from shoal.net.joining import ASK_AGAIN_S, NUMBER, Answering, hold_lease
from shoal.net.listening import free_port, own_address
from shoal.net.process import Child, cores, torch_environment
from shoal.trainer.messages import (
    ANSWER_TIMEOUT_S,
    Answer,
    FindRows,
    FinishSave,
    FoundRows,
    LoadCheckpoint,
    Open,
    Request,
    SaveCheckpoint,
    StartTrainer,
    Step,
    TrainerFailed,
    WriteVersion,
    answer_from,
    flight_recorder,
    request_from,
)
from shoal.weights.pull import VersionPuller

BEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class RankHost:
    """Options of `shoal trainer join`; the variables of a launcher number the rank."""

    url: str
    token: str
    folder: Path
    host: str = ""
    """Address at which other ranks reach this one; the one by which this host reaches the run when empty."""
    threads: int = 0
    gpu: str = ""
    gpu_bytes: int = 0

    async def run(self, announce: Callable[[str], None]) -> None:
        """Works until it is cancelled, in one rank group after another. Raises a `ShoalError`."""
        while True:
            client = Client(self.url, token=self.token)
            try:
                info = await first_info(client, announce)
                try:
                    model_dir = await VersionPuller(client, self.folder / info.key.hex()[:16], info.key).pull(0)
                except EngineUnavailable as error:  # the run has ended meanwhile, or another one began
                    announce(str(error))
                    await asyncio.sleep(ASK_AGAIN_S)
                    continue
                with suppress(OtherRun):
                    link = _Link(self, client, model_dir)
                    check = partial(run_info, key=info.key)
                    await hold_lease(self.url, self.token, self._role(), announce, link.connected, check)
            finally:
                await client.aclose()

    def _role(self) -> RankRole:
        given = os.environ
        address, port = self.host or own_address(self.url), 0
        if given.get("RANK") == "0" and "MASTER_ADDR" in given:
            address, port = given["MASTER_ADDR"], int(given.get("MASTER_PORT", "0"))
        rank, ranks = (int(given[name]) if name in given else None for name in ("RANK", "WORLD_SIZE"))
        return RankRole(address, port or free_port(own_address(self.url)), rank, ranks, self.gpu_bytes)


class _Link:
    """The worker process of a rank, and what passes between it and the run."""

    def __init__(self, host: RankHost, client: Client, model_dir: Path) -> None:
        self._host, self._client, self._model_dir = host, client, model_dir
        self._work = host.folder / f"work-{os.getpid()}"

    @asynccontextmanager
    async def connected(self, socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
        """Starts the worker at the first call of a connection, and ends it with the connection, or the other way."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, self._work, ignore_errors=True)
            children: list[Child] = []
            answering, turn = set[asyncio.Task[bytes]](), asyncio.Lock()
            stack.push_async_callback(_cancelled, answering)

            async def in_turn(frame: bytes) -> bytes:
                return wire.encode(await self._answer(children[0], frame, turn))

            async def answer(request: bytes) -> bytes:
                if not children:
                    child = self._child(msgspec.json.decode(request, type=Gathered))
                    children.append(await stack.enter_async_context(child))
                    beating = asyncio.create_task(_beat(socket, child), name="heartbeat")
                    stack.callback(beating.cancel)
                    return b""
                task = asyncio.create_task(in_turn(request), name="request")
                answering.add(task)
                task.add_done_callback(answering.discard)
                return await asyncio.shield(task)  # the worker goes on with a cancelled request, and fills its folder

            yield answer

    def _child(self, word: Gathered) -> Child:
        where = [f"--rank={word.rank}", f"--ranks={word.ranks}", f"--master={word.master}"]
        if word.per_copy is not None:
            where.append(f"--ranks-per-copy={word.per_copy}")
        gpus = [self._host.gpu] if self._host.gpu else []
        environment = torch_environment(self._host.threads or cores(), gpus, gathers=word.ranks > 1)
        environment |= flight_recorder(self._host.folder)
        log = self._host.folder / f"trainer-{word.rank}.log"
        return Child(f"trainer rank {word.rank}", "shoal.trainer.worker", where, log, environment)

    async def _answer(self, child: Child, frame: bytes, turn: asyncio.Lock) -> Answer:
        """Answer to a request, in its turn; files that are written later are sent while other requests are served."""
        try:
            request = await asyncio.to_thread(request_from, frame)
            ticket, request = self._with_paths(request)
            concurrent, later = isinstance(request, FinishSave), getattr(request, "later", False)
            async with nullcontext() if concurrent else turn:
                if ticket and not concurrent:
                    await self._remove(ticket)
                    (self._work / ticket).mkdir(parents=True)
                if isinstance(request, LoadCheckpoint):
                    await self._fetch(child, ticket, request)
                answer = answer_from(await child.call(wire.encode(request), ANSWER_TIMEOUT_S, concurrent=concurrent))
                if ticket and not later:
                    if not isinstance(request, LoadCheckpoint) and not isinstance(answer, TrainerFailed):
                        await send_files(self._client, ticket, self._work / ticket)
                    await self._remove(ticket)
        except ChildDied:
            raise
        except (ShoalError, OSError) as error:
            return TrainerFailed(f"{type(error).__name__}: {error}")
        return answer

    def _folder(self, ticket: str) -> Path:
        return self._work / _checked(ticket)

    async def _remove(self, ticket: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._work / ticket, ignore_errors=True)

    async def _fetch(self, child: Child, ticket: str, request: LoadCheckpoint) -> None:
        """Fetches the rows of a checkpoint that this rank reads: no rank moves those of the others."""
        folder = self._work / ticket
        await fetch_heads(self._client, ticket, folder)
        asked = FindRows(request.directory, request.name, request.optimizer)
        found = answer_from(await child.call(wire.encode(asked), ANSWER_TIMEOUT_S))
        if isinstance(found, TrainerFailed):
            raise TrainerError(found.reason)
        assert isinstance(found, FoundRows)
        for name, ranges in found.ranges.items():
            await fetch_ranges(self._client, ticket, folder / name, ranges)

    def _with_paths(self, request: Request) -> tuple[str, Request]:
        """Ticket of a request's files, if it has any, and the request with paths of this host."""
        changed = msgspec.structs.replace
        match request:
            case StartTrainer():
                here = {"model_path": str(self._model_dir), "threads": self._host.threads or cores()}
                return "", changed(request, **here)
            case Open():
                return "", changed(request, model_path=str(self._model_dir))
            case Step():  # the file with each token's numbers is for ranks of the run's host
                return "", changed(request, tokens_file=None)
            case WriteVersion(str(path)):
                ticket, _, name = path.partition("/")
                return ticket, changed(request, path=str(self._folder(ticket) / _checked(name)))
            case SaveCheckpoint(ticket) | FinishSave(ticket) | LoadCheckpoint(ticket):
                return ticket, changed(request, directory=str(self._folder(ticket)))
        return "", request


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise WireError(f"expected the name of a file, got {name[:80]!r}")
    return name


async def _cancelled(tasks: Collection[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _beat(socket: aiohttp.ClientWebSocketResponse, child: Child) -> None:
    """Reports the worker's processor time until it ends, and then closes the connection: the rank is gone."""
    with suppress(aiohttp.ClientError, OSError):  # the run has closed it
        while not child.closed():
            await socket.send_bytes(NUMBER.pack(0) + NUMBER.pack(child.ticks))
            await asyncio.sleep(BEAT_S)
        await socket.close()
