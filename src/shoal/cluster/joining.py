"""The side of a role: it asks its run what to do, registers, and holds its lease for as long as both are there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TypeAlias

import aiohttp
import msgspec

from shoal.cluster.registry import JOIN, PROTOCOL, Admitted, NotJoined, Role, RunInfo
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused, ShoalError
from shoal.net.client import LEASE_S, TOKEN_VARIABLE, Client, authorization, session

ASK_AGAIN_S = 0.5
UNAUTHORIZED = 401
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""Name that OpenSSL gives the error."""


class OtherRun(ShoalError):
    """Another run answers at the URL now."""


async def run_info(client: Client) -> RunInfo:
    """Asks the run about itself; waits for as long as it does not answer.

    Raises `ConfigError` without its token, and for a certificate that is not trusted here.
    """
    while True:
        try:
            info = await client.ask("GET", "/v1/run", RunInfo)
        except EngineUnavailable as error:
            if UNTRUSTED in str(error):
                raise ConfigError(f"{error}; SSL_CERT_FILE names the authority of its certificate") from None
            await asyncio.sleep(ASK_AGAIN_S)
        except RequestRefused as error:  # a run that begins has no such route yet
            if f"HTTP {UNAUTHORIZED}" in str(error):
                raise ConfigError(f"{client.url} wants its token; set {TOKEN_VARIABLE}") from None
            await asyncio.sleep(ASK_AGAIN_S)
        else:
            if info.protocol != PROTOCOL:
                raise ConfigError(f"{client.url}: expected protocol {PROTOCOL}, got {info.protocol}; install its Shoal")
            return info


Work: TypeAlias = Callable[
    [aiohttp.ClientWebSocketResponse], AbstractAsyncContextManager[Callable[[bytes], Awaitable[None]]]
]
"""Work of a role while it is connected: it takes the binary messages of the run."""


@asynccontextmanager
async def no_work(_: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Work of a role that the run asks elsewhere."""

    async def take(message: bytes) -> None:
        """Does nothing."""

    yield take


async def hold_lease(
    url: str, token: str, role: Role, key: bytes, announce: Callable[[str], None], work: Work = no_work
) -> None:
    """Keeps a role registered for ever, also over restarts of the run; `announce` gets each name and refusal.

    Raises `ConfigError` when the run will not have the role, and `OtherRun` when the key at the URL is another one.
    """
    client, said = Client(url, token=token, timeout_s=LEASE_S), ""

    def say(words: str) -> None:
        nonlocal said
        if words != said:
            announce(words)
        said = words

    async with session() as http:
        try:
            while True:
                if (await run_info(client)).key != key:
                    raise OtherRun(f"another run answers at {url}")
                with suppress(aiohttp.ClientError, OSError):
                    connecting = http.ws_connect(
                        url + JOIN, headers=authorization(token), heartbeat=LEASE_S / 2, max_msg_size=0
                    )
                    async with connecting as socket, work(socket) as take:
                        await socket.send_str(msgspec.json.encode(role).decode())
                        async for message in socket:
                            if message.type is aiohttp.WSMsgType.BINARY:
                                await take(message.data)
                                continue
                            answer: Admitted | NotJoined = msgspec.json.decode(message.data, type=Admitted | NotJoined)
                            if isinstance(answer, NotJoined) and not answer.again:
                                raise ConfigError(f"{url} says: {answer.reason}")
                            if isinstance(answer, NotJoined):
                                say(f"{url} says: {answer.reason}")
                            else:
                                say(f"joined {url} as {answer.name}")
                await asyncio.sleep(ASK_AGAIN_S)
        finally:
            await client.aclose()
