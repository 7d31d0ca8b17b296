"""The role's side of a lease: it answers or disconnects, outlives what it is sent, and says why it waits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from websockets.server import ServerProtocol

from shoal.cluster.registry import first_info
from shoal.errors import ChildDied, WorkerLost
from shoal.net.client import Client
from shoal.net.joining import Answering, RunRole, hold_lease
from shoal.net.run_server import LeasedWorker, RunServer


class Role(RunRole, frozen=True, tag="role"):
    """A role of the tests."""


@asynccontextmanager
async def leasing(url: str, answer: Answering, heard: Callable[[str], None]) -> AsyncIterator[None]:
    """Holds a lease within the block; requests of the run get `answer`."""

    @asynccontextmanager
    async def work(_: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
        yield answer

    holding = asyncio.create_task(hold_lease(url, "", Role(), heard, work))
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.wait({holding})


@pytest.mark.parametrize(
    "error",
    [ChildDied("killed"), OSError(28, "No space left on device"), RuntimeError("bug"), UnicodeError("half a pair")],
    ids=lambda error: type(error).__name__,
)
def test_a_request_that_a_role_cannot_answer_ends_its_connection_and_not_the_role(error: Exception) -> None:
    async def main(server: RunServer) -> None:
        joined: asyncio.Queue[LeasedWorker] = asyncio.Queue()
        heard: list[str] = []

        @asynccontextmanager
        async def use(_: Role, worker: LeasedWorker) -> AsyncIterator[None]:
            joined.put_nowait(worker)
            yield

        async def fail(_: bytes) -> bytes:
            raise error

        server.open(Role, use)
        async with leasing(server.url, fail, heard.append):
            with pytest.raises(WorkerLost):
                await (await joined.get()).call(b"request", 60)
            await joined.get()
        assert str(error) in heard

    with RunServer() as server:
        asyncio.run(main(server))


FRAMES = {
    "a reserved opcode": b"\x83\x00",
    "no JSON": b"\x81\x01{",
    "no greeting": b'\x81\x11{"type": "other"}',
    "no number": b"\x82\x02ab",
    "no text": b"\x81\x01\xff",
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
async def test_a_role_joins_again_after_what_is_no_message_of_a_run(frame: bytes) -> None:
    connections: asyncio.Queue[None] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = ServerProtocol()
        server.receive_data(await reader.readuntil(b"\r\n\r\n"))
        (request,) = server.events_received()
        server.send_response(server.accept(request))  # type: ignore[arg-type]
        writer.write(b"".join(server.data_to_send()))
        await reader.read(1)  # of the role's first message
        writer.write(frame)
        connections.put_nowait(None)
        if frame[0] == 0x82:  # is passed over
            writer.close()
        await reader.read()
        writer.close()

    async def answer(_: bytes) -> bytes:
        return b""

    async with await asyncio.start_server(serve, "127.0.0.1") as listening:
        port = listening.sockets[0].getsockname()[1]
        async with leasing(f"http://127.0.0.1:{port}", answer, lambda _: None):
            await connections.get()
            await connections.get()


async def test_a_role_does_not_wait_for_a_host_that_answers_nothing() -> None:
    silent: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.put_nowait(writer)

    async with await asyncio.start_server(serve, "127.0.0.1") as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(60):
            leased = await said_first(lambda announce: hold_lease(url, "", Role(), announce))
            described = await said_first(lambda announce: asked(url, announce))
        while not silent.empty():
            silent.get_nowait().close()
    assert leased == described == f"waiting for a run at {url}: TimeoutError"


async def asked(url: str, announce: Callable[[str], None], token: str = "") -> None:
    client = Client(url, token=token)
    try:
        await first_info(client, announce)
    finally:
        await client.aclose()


async def said_first(waiting: Callable[[Callable[[str], None]], Awaitable[object]]) -> str:
    heard: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.ensure_future(waiting(heard.put_nowait))
    said = await heard.get()
    task.cancel()
    await asyncio.wait({task})
    return said


@pytest.mark.parametrize(
    ("host", "path", "why"),
    [
        ("localhost.example", "", "HTTP 421"),
        ("127.0.0.1", "/elsewhere", "HTTP 40"),
        ("name.invalid", "", "name"),
        ("127.0.0.1:1", "", "Connect"),
    ],
)
def test_a_role_without_a_run_says_why_it_waits(
    host: str, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunServer() as server:
        port = server.url.rpartition(":")[2]
        url = f"http://{host}{'' if ':' in host else f':{port}'}{path}"
        if host == "localhost.example":
            resolved = aiohttp.ThreadedResolver.resolve

            async def resolve(self: aiohttp.ThreadedResolver, name: str, *rest: object, **words: object) -> object:
                return await resolved(self, "127.0.0.1", *rest, **words)  # type: ignore[arg-type]

            monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
        leased = asyncio.run(said_first(lambda announce: hold_lease(url, "", Role(), announce)))
        token = "" if host == "localhost.example" else server.token
        described = asyncio.run(said_first(lambda announce: asked(url, announce, token)))
    for said in (leased, described):
        assert said.startswith(f"waiting for a run at {url}: ")
        assert why.lower() in said.lower()
