"""The connection of a role to its run: the greeting, numbered messages, and the role's side of the lease.

role -> run   its `RunRole`, as JSON text
run -> role   `Admitted` or `NotJoined`, as JSON text; then binary messages in both directions
run -> role   number of a call, request; without a request the call is cancelled
role -> run   number of a call, answer; or 0, processor time of the role in ticks
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TypeAlias

import aiohttp
import msgspec

from shoal.errors import ConfigError, EngineUnavailable
from shoal.net.client import CLOSE_S, LEASE_S, TOKEN_VARIABLE, Client, authorization, decoded, session
from shoal.net.listening import at_loopback, own_token

PROTOCOL = 2
JOIN = "/v1/join"
NUMBER = struct.Struct(">Q")
"""Head of each binary message."""
ASK_AGAIN_S = 0.5
UNAUTHORIZED = 401


class RunRole(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a role; each kind has a tag, and says what the process can do and where it listens."""

    protocol: int = PROTOCOL


class Admitted(msgspec.Struct, frozen=True, tag="joined"):
    """Answer to a role that the run uses from now on, under this name."""

    name: str


class NotJoined(msgspec.Struct, frozen=True, tag="refused"):
    """Answer to a role that the run cannot use; `again` says that it may ask again."""

    reason: str
    again: bool


Answering: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Answers a request of the run; cancelled when the run no longer waits."""
Work: TypeAlias = Callable[[aiohttp.ClientWebSocketResponse], AbstractAsyncContextManager[Answering]]
"""Context manager of the work during one connection."""


@asynccontextmanager
async def no_work(_: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
    """Work of a role that the run asks over HTTP."""

    async def answer(request: bytes) -> bytes:
        """Answers nothing."""
        return b""

    yield answer


async def hold_lease(
    url: str,
    token: str,
    role: RunRole,
    announce: Callable[[str], None],
    work: Work = no_work,
    check: Callable[[Client], Awaitable[object]] | None = None,
) -> None:
    """Keeps a role registered until it is cancelled, also over restarts of the run.

    Without a `token` it reads `own_token`. `announce` gets each name, refusal and wait. `check` precedes each
    connection; its `EngineUnavailable` is retried.
    Raises `ConfigError` when the token is wrong or the run refuses the role, and what `check` raises.
    """
    url = at_loopback(url)
    client, say = Client(url, token=token, timeout_s=LEASE_S), without_repeats(announce)
    refused: str | None = None
    async with session() as http:
        try:
            while True:
                known = token or own_token(url)
                try:
                    if check is not None:
                        await check(client)
                    connecting = http.ws_connect(
                        url + JOIN,
                        headers=authorization(known),
                        heartbeat=LEASE_S / 2,
                        max_msg_size=0,
                        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                    )
                    limit = asyncio.timeout(LEASE_S)  # of a connection: a host that is gone answers nothing
                    async with limit, connecting as socket, work(socket) as answering:
                        limit.reschedule(None)
                        await socket.send_str(msgspec.json.encode(role).decode())
                        await _served(socket, answering, url, say)
                except (aiohttp.ClientError, OSError, EngineUnavailable) as error:
                    if not isinstance(error, aiohttp.WSServerHandshakeError) or error.status != UNAUTHORIZED:
                        say(waiting(url, error))
                        refused = None
                    elif token:
                        why = (
                            f"{url} wants another token; set {TOKEN_VARIABLE} to its own, or unset it for your own run"
                        )
                        raise ConfigError(why) from None
                    elif known == refused:
                        raise ConfigError(f"{url} wants its token; set {TOKEN_VARIABLE}") from None
                    else:
                        refused = known  # the run may be ending, or another has begun meanwhile
                await asyncio.sleep(ASK_AGAIN_S)
        finally:
            await client.aclose()


def without_repeats(announce: Callable[[str], None]) -> Callable[[str], None]:
    """`announce` without sentences that are the same as the last one."""
    said = ""

    def say(sentence: str) -> None:
        nonlocal said
        if sentence != said:
            announce(sentence)
        said = sentence

    return say


def waiting(url: str, error: Exception) -> str:
    """Sentence of a role that has no run yet, with the reason."""
    if isinstance(error, aiohttp.WSServerHandshakeError):
        why = f"it answers HTTP {error.status}"
    elif isinstance(error, aiohttp.ClientConnectorError):
        why = error.os_error.strerror or str(error.os_error)
    else:
        why = str(error) or type(error).__name__
    return f"waiting for a run at {url}: {why}"


async def _served(
    socket: aiohttp.ClientWebSocketResponse, answering: Answering, url: str, say: Callable[[str], None]
) -> None:
    """Answers calls until the connection ends, which a call without an answer ends, too.

    Raises `ConfigError` for a refusal that is final, and `EngineUnavailable` for another message than expected.
    """
    running: dict[bytes, asyncio.Task[None]] = {}

    async def answer(number: bytes, request: bytes) -> None:
        try:
            await socket.send_bytes(number + await answering(request))
        except Exception as error:  # the run would wait for an answer until its deadline: it shall lose this role
            if not isinstance(error, ConnectionError):
                say(str(error) or type(error).__name__)
            await socket.close()

    try:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                number, request = message.data[: NUMBER.size], message.data[NUMBER.size :]
                if request:
                    running[number] = asyncio.create_task(answer(number, request), name=f"call {number.hex()}")
                    running[number].add_done_callback(partial(running.pop, number))
                elif number in running:
                    running[number].cancel()
                continue
            if message.type is not aiohttp.WSMsgType.TEXT:  # no answer to a ping, or no WebSocket frame
                return
            greeting: Admitted | NotJoined = decoded(message.data, Admitted | NotJoined, url)  # type: ignore[arg-type]
            if isinstance(greeting, Admitted):
                say(f"joined {url} as {greeting.name}")
            elif greeting.again:
                say(f"{url} refused: {greeting.reason}")
            else:
                raise ConfigError(f"{url} refused: {greeting.reason}")
    finally:
        tasks = list(running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
