"""The HTTP server of a run, in a separate thread, so that a busy main event loop delays no ping.

Rooms add their routes. A role of a run is a process that holds a WebSocket open here: the connection is its lease.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from shoal.errors import ConfigError, ShoalError
from shoal.net.client import LEASE_S, TOKEN_VARIABLE
from shoal.net.listening import is_loopback, listening_socket, tls_files, url_of
from shoal.net.server import HANDLERS, Bounds, decoded, guarded, serving

STOP_GRACE_S = 1

R = TypeVar("R")


class RunServer:
    """Routes on a separate event loop. As a context manager it listens, in a thread."""

    def __init__(
        self,
        routes: Sequence[BaseRoute] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        free: Collection[str] = (),
        lease_s: float = LEASE_S,
    ) -> None:
        """With a `token`, every request but those of `free` paths must carry it.

        Raises `ConfigError` when other machines can reach `host` and there is no token.
        """
        if not is_loopback(host) and not token:
            raise ConfigError(f"host: {host} can be reached by others; set {TOKEN_VARIABLE} to a token of their own")
        self.token, self._at, self._lease_s = token, (host, port), lease_s
        guard = Middleware(guarded, token=token, free=free, host=host)
        self.app = Starlette(routes=routes, middleware=[guard], exception_handlers=dict(HANDLERS))

    def add(self, routes: Sequence[BaseRoute]) -> None:
        """Adds routes, also while the server listens."""
        self.app.router.routes.extend(routes)

    def __enter__(self) -> Self:
        self._tls, self._stopping = tls_files(), asyncio.Event()
        self._listening = listening_socket(*self._at)
        self.url = url_of(self._listening, self._tls)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="run server", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread; roles keep trying to connect."""
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _serve(self) -> None:
        async def serve() -> None:
            bounds: Bounds = {"grace_s": STOP_GRACE_S, "silence_s": self._lease_s}
            async with serving(self.app, listening=self._listening, tls=self._tls, **bounds):
                await self._stopping.wait()

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(serve())

    def wait(self, doing: Coroutine[Any, Any, R]) -> R:
        """The result of a coroutine on the server's loop, for any other thread; blocks."""
        return asyncio.run_coroutine_threadsafe(doing, self.loop).result()

    async def done(self, doing: Coroutine[Any, Any, R]) -> R:
        """The result of a coroutine on the server's loop, for another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(doing, self.loop))

    async def lease(
        self,
        socket: WebSocket,
        hello: type[R],
        registered: Callable[[R, WebSocket], AbstractAsyncContextManager[Callable[[bytes], object]]],
        refused: Callable[[Exception], object],
    ) -> None:
        """Serves the connection of one role from its first message to its last.

        `registered` takes the first message and yields a function for the later ones; it exits with the connection.
        Both may raise a `ShoalError`; the role then gets the message that `refused` makes of the error.
        """
        await socket.accept()
        try:
            async with asyncio.timeout(self._lease_s):
                first = decoded(await _message(socket), hello)
            await self._held(registered(first, socket), socket)
        except (ShoalError, TimeoutError) as error:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has disconnected meanwhile
                await send(socket, refused(error))
                await socket.close()
        except WebSocketDisconnect:
            return

    async def _held(
        self, registered: AbstractAsyncContextManager[Callable[[bytes], object]], socket: WebSocket
    ) -> None:
        """Keeps a role registered until its connection ends, which also ends a registration under way."""
        messages: asyncio.Queue[bytes] = asyncio.Queue()

        async def serve() -> None:
            async with registered as received:
                while True:
                    received(await messages.get())

        async def read() -> None:
            while True:
                messages.put_nowait(await _message(socket))

        serving, reading = asyncio.ensure_future(serve()), asyncio.ensure_future(read())
        try:
            await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            reading.result()
        finally:
            reading.cancel()
            serving.cancel()
            await asyncio.wait({serving, reading})


async def _message(socket: WebSocket) -> bytes:
    """The next message. Raises `WebSocketDisconnect`."""
    given = await socket.receive()
    if given["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    return given.get("bytes") or (given.get("text") or "").encode()


async def send(socket: WebSocket, message: object) -> None:
    """Sends a message as JSON text."""
    await socket.send_text(msgspec.json.encode(message).decode())
