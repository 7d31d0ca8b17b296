"""A rank that ends while it starts costs a Tinker server nothing but the wait for another one."""

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from shoal.cluster.registry import Gathered, RankRole
from shoal.net.client import authorization
from shoal.net.joining import JOIN, NUMBER
from shoal.net.run_server import RunServer
from shoal.run.commands.serve import _joined_trainer
from shoal.tinker.futures import Futures
from shoal.tinker.models_trainer import ServerSettings
from shoal.tinker.store import Store
from shoal.tinker.training import Training


async def started_and_gone(server: RunServer) -> Gathered:
    """Joins as a rank, and leaves at the request to start; returns that request."""
    own = authorization(server.token)
    async with aiohttp.ClientSession(headers=own) as http, http.ws_connect(server.url + JOIN) as socket:
        await socket.send_str(msgspec.json.encode(RankRole(address="127.0.0.1", port=1)).decode())
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                return msgspec.json.decode(message.data[NUMBER.size :], type=Gathered)
            if b"refused" in message.data.encode():  # the group of the last rank is not over yet
                return await started_and_gone(server)
    raise AssertionError


async def test_a_tinker_server_waits_for_another_rank_when_one_ends_as_it_starts(tmp_path: Path) -> None:
    with RunServer() as server:
        store = Store(tmp_path / "server.sqlite")
        training = Training(store, ServerSettings({}, tmp_path), Futures(store), partial(_joined_trainer, server))
        serving = asyncio.create_task(training.run())
        await asyncio.sleep(0)
        for _ in range(3):
            asking = asyncio.create_task(started_and_gone(server))
            await asyncio.wait({asking, serving}, return_when=asyncio.FIRST_COMPLETED)
            assert not serving.done(), serving.exception()
            assert (await asking).ranks == 1
        serving.cancel()
        await asyncio.wait({serving})
