"""The lease of a role: what a run takes up it leaves, and calls end, however a connection begins and ends."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import msgspec
import pytest
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from shoal.errors import WorkerLost
from shoal.net.client import authorization
from shoal.net.joining import JOIN, RunRole
from shoal.net.run_server import LeasedWorker, RunServer
from until import until


class Role(RunRole, frozen=True, tag="role"):
    """A role of the tests."""


class Uses:
    """Uses of roles: which were entered, and which were left."""

    def __init__(self, turns: int = 0) -> None:
        self.entered: list[LeasedWorker] = []
        self.left: list[LeasedWorker] = []
        self._turns = turns

    @asynccontextmanager
    async def use(self, _: Role, worker: LeasedWorker) -> AsyncIterator[None]:
        for _turn in range(self._turns):
            await asyncio.sleep(0)
        self.entered.append(worker)
        try:
            yield
        finally:
            self.left.append(worker)


@asynccontextmanager
async def connected(
    server: RunServer,
) -> AsyncIterator[tuple[ClientProtocol, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A WebSocket whose bytes the test sends as it likes."""
    at = urlsplit(server.url)
    client = ClientProtocol(parse_uri(f"ws://{at.netloc}{JOIN}"))
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    request = client.connect()
    request.headers.update(authorization(server.token))
    client.send_request(request)
    writer.write(b"".join(client.data_to_send()))
    client.receive_data(await reader.readuntil(b"\r\n\r\n"))
    try:
        yield client, reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def come_and_go(server: RunServer) -> None:
    """Sends the first message and the last one in one packet, and reads until the server closes."""
    async with connected(server) as (client, reader, writer):
        client.send_text(msgspec.json.encode(Role()))
        client.send_close(1000)
        writer.write(b"".join(client.data_to_send()))
        await reader.read()


@asynccontextmanager
async def stopped(server: RunServer) -> AsyncIterator[None]:
    """Serves within the block; afterwards the server is done with every connection."""
    await asyncio.to_thread(server.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_use_that_is_entered_while_its_connection_ends_is_left_and_its_calls_fail(
    turns: int, elsewhere: bool
) -> None:
    uses, server = Uses(turns), RunServer()
    async with stopped(server):
        server.open(Role, uses.use, None if elsewhere else server.loop)
        for _ in range(5):
            await come_and_go(server)
    assert set(uses.left) == set(uses.entered)
    for worker in uses.entered:
        with pytest.raises(WorkerLost):
            await worker.called(b"request", 60)


async def test_a_role_that_comes_and_goes_while_the_run_s_event_loop_is_busy_is_not_used() -> None:
    uses, server = Uses(), RunServer()
    async with stopped(server):
        server.open(Role, uses.use)
        elsewhere = threading.Thread(target=lambda: asyncio.run(come_and_go(server)))
        elsewhere.start()
        elsewhere.join()  # blocks this event loop
    assert set(uses.left) == set(uses.entered)


async def test_a_role_that_neither_reads_nor_answers_pings_is_lost() -> None:
    uses, server = Uses(), RunServer(lease_s=2.0)
    async with stopped(server):
        server.open(Role, uses.use)
        async with connected(server) as (client, _, writer):
            client.send_text(msgspec.json.encode(Role()))
            writer.write(b"".join(client.data_to_send()))
            cast("asyncio.Transport", writer.transport).pause_reading()
            await until(lambda: bool(uses.entered))
            with pytest.raises(WorkerLost):
                await uses.entered[0].call(bytes(32 << 20), 20)


def test_a_role_of_a_kind_whose_event_loop_has_ended_hears_that_the_run_ends() -> None:
    async def opens(server: RunServer) -> None:
        server.open(Role, Uses().use)

    async def joins(server: RunServer) -> bytes:
        async with connected(server) as (client, reader, writer):
            client.send_text(msgspec.json.encode(Role()))
            writer.write(b"".join(client.data_to_send()))
            return await reader.read()

    with RunServer() as server:
        asyncio.run(opens(server))
        assert b"the run ends" in asyncio.run(joins(server))
