"""A group of ranks starts whole or not at all."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal import wire
from shoal.cluster.files import FileShelf
from shoal.cluster.rank_group import RankGroup, RemoteRank
from shoal.cluster.rank_role import RankHost, _Link
from shoal.cluster.registry import Gathered, RankRole
from shoal.errors import WorkerLost
from shoal.net.client import Client
from shoal.net.joining import Answering, hold_lease
from shoal.net.process import Child
from shoal.net.run_server import RunServer
from shoal.trainer.worker import TrainerProcess
from until import until


class Worker:
    """A rank that answers at once."""

    def __init__(self, name: str) -> None:
        self.name, self.ticks, self.closed = name, 0, False

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True


class Server:
    """Lets a test join ranks without their connections."""

    def __init__(self) -> None:
        self.use: Callable[[Any, Any], AbstractAsyncContextManager[None]]

    def open(self, kind: object, use: Any) -> None:
        self.use = use

    def close(self, kind: object) -> None: ...

    @contextmanager
    def added(self, routes: Sequence[object]) -> Iterator[None]:
        yield


def test_a_rank_that_leaves_as_the_last_one_joins_starts_no_smaller_group() -> None:
    server, names = Server(), list[str]()

    async def train() -> None:
        async with RankGroup(2).ranks(server) as ranks:  # type: ignore[arg-type]
            names.extend(rank.worker.name for rank in ranks)

    async def join_and_leave() -> None:
        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        first, second, third = (server.use(RankRole(address="127.0.0.1", port=1), Worker(name)) for name in "abc")
        await first.__aenter__()
        await second.__aenter__()  # the group is full; before its task runs, a rank leaves
        await first.__aexit__(None, None, None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not training.done()
        assert names == []
        await third.__aenter__()
        await training

    asyncio.run(join_and_leave())
    assert names == ["b", "c"]


@pytest.mark.parametrize("error", [WorkerLost("a has left"), TimeoutError()], ids=["lost", "silent"])
async def test_a_rank_that_does_not_start_ends_the_group_with_one_error_after_which_a_run_goes_on(
    error: Exception,
) -> None:
    server = Server()

    class Failing(Worker):
        async def call(self, request: bytes, timeout_s: float) -> bytes:
            assert timeout_s <= 600, "a rank that starts is not waited for as long as one that trains"
            raise error

    async def train() -> None:
        async with RankGroup(2).ranks(server):  # type: ignore[arg-type]
            raise AssertionError

    training = asyncio.create_task(train())
    await asyncio.sleep(0)
    for worker in (Worker("a"), Failing("b")):
        await server.use(RankRole(address="127.0.0.1", port=1), worker).__aenter__()
    with pytest.raises(WorkerLost):
        await training


@pytest.mark.parametrize("answer", [b"\xff garbage", b"", wire.encode(["unknown"])])
async def test_an_answer_of_a_rank_that_cannot_be_read_loses_that_rank_and_not_the_run(
    answer: bytes, tmp_path: Path
) -> None:
    class Answering(Worker):
        async def call(self, request: bytes, timeout_s: float) -> bytes:
            return answer

    trainer = TrainerProcess([RemoteRank(Answering("a"), FileShelf())])  # type: ignore[arg-type]
    with pytest.raises(WorkerLost, match="a answered"):
        await trainer.finish_save(tmp_path)


SLOW = """
import sys, socket, time
from pathlib import Path
from shoal import wire
from shoal.net.process import serve
from shoal.trainer.messages import Done, SaveCheckpoint, WriteVersion, request_from

def answer(frame):
    request, here = request_from(frame), Path(__file__).parent
    file = Path(request.path) if isinstance(request, WriteVersion) else Path(request.directory) / "state.bin"
    file.write_bytes(b"first half")
    (here / f"began {file.name}").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    with file.open("ab") as rest:
        rest.write(b", second half")
    return Done(1.0)

with socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1])) as connection:
    serve(connection, lambda frame: [wire.encode(answer(frame))])
"""


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the connection that ends with its rank
def test_a_request_after_a_cancelled_one_gets_its_own_files_and_no_others(tmp_path: Path) -> None:
    class Link(_Link):
        asked = 0

        @asynccontextmanager
        async def connected(self, socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
            async with super().connected(socket) as answering:

                async def answer(request: bytes) -> bytes:
                    self.asked += 1
                    return await answering(request)

                yield answer

        def _child(self, word: Gathered) -> Child:
            environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
            return Child("trainer", "slow_rank", [], tmp_path / "log", environment)

    async def main(server: RunServer) -> dict[str, bytes]:
        client = Client(server.url, token=server.token)
        link = Link(RankHost(server.url, "", tmp_path), client, tmp_path)
        role = RankRole(address="127.0.0.1", port=1)
        joining = asyncio.create_task(hold_lease(server.url, "", role, print, link.connected))
        async with RankGroup(1).ranks(server) as ranks:
            trainer = TrainerProcess(ranks)
            cancelled = asyncio.create_task(trainer.write_version(tmp_path / "version" / "model.safetensors"))
            await until((tmp_path / "began model.safetensors").exists)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            saving = asyncio.create_task(trainer.save(tmp_path / "checkpoint"))
            await until(lambda: link.asked == 3)
            (tmp_path / "go").touch()
            await saving
        joining.cancel()
        await asyncio.wait({joining})
        await client.aclose()
        return {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}

    (tmp_path / "slow_rank.py").write_text(SLOW)
    for folder in ("version", "checkpoint"):
        (tmp_path / folder).mkdir()
    with RunServer() as server:
        assert asyncio.run(main(server)) == {"state.bin": b"first half, second half"}


def test_a_group_that_has_waited_for_a_lost_host_starts_with_the_whole_hosts_that_are_there() -> None:
    server, names = Server(), list[str]()

    async def main() -> None:
        async def train() -> None:
            async with RankGroup(6, per_host=2, shrinks_after_s=0.01).ranks(server) as ranks:  # type: ignore[arg-type]
                names.extend(rank.worker.name for rank in ranks)

        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        async with AsyncExitStack() as joined:
            for name, host in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.1")):
                role = RankRole(address=host, port=1)
                await joined.enter_async_context(server.use(role, Worker(name)))  # type: ignore[arg-type]
            await training

    asyncio.run(main())
    assert names == ["a", "c"], "the host of b has lost a GPU"
