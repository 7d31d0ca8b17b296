"""The HTTP server of a run, in a separate thread, so that a busy main event loop delays no ping.

    GET /v1/join     the WebSocket of a role: its lease
    GET /v1/roles    the roles that are there

Rooms add their routes, and open the kinds of roles that they use. A role belongs to the run for as long as its
connection answers pings.
"""

import asyncio
import contextlib
import itertools
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from shoal.errors import ConfigError, ShoalError, WorkerLost
from shoal.files import replaced
from shoal.net.client import LEASE_S, TOKEN_VARIABLE
from shoal.net.joining import JOIN, NUMBER, PROTOCOL, Admitted, NotJoined, RunRole
from shoal.net.listening import is_loopback, listening_socket, tls_files, token_file, url_of
from shoal.net.server import HANDLERS, Bounds, decoded, guarded, json, serving

STOP_GRACE_S = 1

R = TypeVar("R")


class NotWanted(ShoalError):
    """A role that the run will not use, however often it asks."""


class LeasedWorker:
    """Worker that has joined, for as long as its connection lasts; calls may overlap.

    Its state belongs to the server's event loop.
    """

    def __init__(self, name: str, server: "RunServer") -> None:
        self.name, self.ticks = name, 0
        self.outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        """Messages to send; an empty one ends the lease."""
        self._server = server
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._gone = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of calls without an answer."""
        return len(self._calls)

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        """Answer to a request, for another event loop than the server's. Raises as `called` does."""
        return await self._server.done(self.called(request, timeout_s))

    async def called(self, request: bytes, timeout_s: float) -> bytes:
        """Answer to a request, on the server's event loop.

        Raises `WorkerLost` and `TimeoutError`. A call that ends without an answer is cancelled at the worker.
        """
        if self._gone.is_set():
            raise self._lost()
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self.outgoing.put_nowait(NUMBER.pack(number) + request)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._calls[number]
            if answer.cancelled():
                self.outgoing.put_nowait(NUMBER.pack(number))

    async def died(self) -> str:
        """Waits on another event loop until the worker has left; raises `WorkerLost`, after which a run can go on."""
        await self._server.done(self._gone.wait())
        raise self._lost()

    def close(self) -> None:
        """Ends the lease, from any thread."""
        self._server.loop.call_soon_threadsafe(self.outgoing.put_nowait, b"")

    def take(self, message: bytes) -> None:
        """Takes a message of the worker; a late answer is dropped. Raises a `ShoalError`."""
        try:
            (number,) = NUMBER.unpack_from(message)
            if number == 0:
                (self.ticks,) = NUMBER.unpack_from(message, NUMBER.size)
        except struct.error:
            raise ShoalError(f"expected the number of a call before its answer, got {message[:80]!r}") from None
        answer = self._calls.get(number)
        if answer is not None and not answer.done():
            answer.set_result(message[NUMBER.size :])

    def lose(self) -> None:
        """Fails the calls without an answer: the worker has left."""
        self._gone.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._lost())

    def _lost(self) -> WorkerLost:
        return WorkerLost(f"{self.name} has left")


K = TypeVar("K", bound=RunRole)
Used: TypeAlias = AbstractAsyncContextManager[None]
"""Use of a role: entered once the run uses it, which may raise a `ShoalError`, and left when it is gone."""


@dataclass(frozen=True, slots=True)
class _Opened:
    kind: type[RunRole]
    use: Callable[[Any, LeasedWorker], Used]
    loop: asyncio.AbstractEventLoop


class _Head(msgspec.Struct):
    """Part of a role's first message that is the same for all kinds."""

    type: str
    protocol: int = PROTOCOL


class RunServer:
    """Routes on a separate event loop. As a context manager it listens, in a thread."""

    def __init__(
        self,
        routes: Sequence[BaseRoute] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        lease_s: float = LEASE_S,
    ) -> None:
        """Every request must carry the `token`. A server without one makes it, and leaves it in its `token_file`.

        Raises `ConfigError` when other machines can reach `host` and there is no token.
        """
        if not is_loopback(host) and not token:
            raise ConfigError(f"host: {host} can be reached by others; set {TOKEN_VARIABLE} to a token")
        self.token, self._makes_token = token or secrets.token_urlsafe(24), not token
        self._token_file: Path | None = None
        self._at, self._lease_s = (host, port), lease_s
        self.on_role: Callable[[str, str], None] = lambda name, state: None
        """Called in the server's thread with the name of a role, and what became of it."""
        self._opened: dict[str, _Opened] = {}
        self._present: dict[str, float] = {}
        self._numbers: Counter[str] = Counter()
        guard = Middleware(guarded, token=self.token, host=host)
        own = [WebSocketRoute(JOIN, self._join), Route("/v1/roles", self._list)]
        self.app = Starlette(routes=[*own, *routes], middleware=[guard], exception_handlers=dict(HANDLERS))

    @contextlib.contextmanager
    def added(self, routes: Sequence[BaseRoute]) -> Iterator[None]:
        """Serves more routes within the block, also while the server listens."""
        self.app.router.routes.extend(routes)
        try:
            yield
        finally:
            self.app.router.routes[:] = [route for route in self.app.router.routes if route not in routes]

    def __enter__(self) -> Self:
        self._tls, self._stopping = tls_files(), asyncio.Event()
        self._listening = listening_socket(*self._at)
        self.url = url_of(self._listening, self._tls)
        if self._makes_token:
            self._leave_token()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="run server", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread; roles keep trying to connect."""
        if self._token_file is not None:
            with contextlib.suppress(OSError):
                self._token_file.unlink()
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _leave_token(self) -> None:
        """Writes the token before the first answer. Raises `ConfigError`."""
        try:
            file = token_file(self.url)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replaced(file, private=True) as unfinished:
                unfinished.write_text(self.token)
            self._token_file = file
        except (OSError, RuntimeError) as error:  # a user without a home is a RuntimeError
            self._listening.close()
            why = f"token: expected a cache folder that can be written, got: {error}; set {TOKEN_VARIABLE}"
            raise ConfigError(why) from error

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

    def open(
        self,
        kind: type[K],
        use: Callable[[K, LeasedWorker], Used],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Lets roles of a kind in; they are used on `loop`, by default the running one."""
        self._opened[_tag(kind)] = _Opened(kind, use, loop or asyncio.get_running_loop())

    def close(self, kind: type[RunRole]) -> None:
        """Lets no more roles of a kind in; those there stay until their connections end."""
        self._opened.pop(_tag(kind), None)

    async def _list(self, _: Request) -> Response:
        now_s = time.monotonic()
        return json({name: {"seconds": now_s - since_s} for name, since_s in sorted(self._present.items())})

    async def _join(self, socket: WebSocket) -> None:
        """Serves the connection of one role from its first message to its last."""
        await socket.accept()
        try:
            async with asyncio.timeout(self._lease_s):
                first = await _message(socket)
            await self._leased(first, socket)
        except (ShoalError, TimeoutError) as error:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has disconnected meanwhile
                await _send(socket, NotJoined(str(error), again=not isinstance(error, NotWanted)))
                await socket.close()
        except WebSocketDisconnect:
            return

    async def _leased(self, first: bytes, socket: WebSocket) -> None:
        """Keeps a role registered until its connection ends, which also ends a registration under way."""
        head = decoded(first, _Head)
        if head.protocol != PROTOCOL:
            raise NotWanted(f"protocol: expected {PROTOCOL}, got {head.protocol}; install the run's version")
        opened = self._opened.get(head.type)
        if opened is None:
            raise ShoalError(f"the run takes no role {head.type[:80]!r} now")
        role = decoded(first, opened.kind)
        self._numbers[head.type] += 1
        worker = LeasedWorker(f"{head.type}-joined-{self._numbers[head.type]}", self)

        async def read() -> None:
            while True:
                worker.take(await _message(socket))

        serving = asyncio.ensure_future(self._served(opened, role, worker, socket))
        reading = asyncio.ensure_future(read())
        try:
            await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            else:
                reading.result()
        finally:
            reading.cancel()
            serving.cancel()
            await asyncio.wait({serving, reading})

    async def _served(self, opened: _Opened, role: RunRole, worker: LeasedWorker, socket: WebSocket) -> None:
        """Has a role used, and sends its messages."""
        name = worker.name
        async with self._used(opened, role, worker):
            self._present[name] = time.monotonic()
            self.on_role(name, "joined")
            try:
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the role disconnects
                    await _send(socket, Admitted(name))
                    while message := await worker.outgoing.get():
                        await socket.send_bytes(message)
                    await socket.close()
            finally:
                del self._present[name]
                self.on_role(name, "left")

    @contextlib.asynccontextmanager
    async def _used(self, opened: _Opened, role: RunRole, worker: LeasedWorker) -> AsyncIterator[None]:
        """Has a role used within the block. Raises a `ShoalError`."""
        entered, left = asyncio.Event(), asyncio.Event()

        async def use() -> None:  # enters and leaves in one task, which a lost connection does not separate
            async with opened.use(role, worker):
                self.loop.call_soon_threadsafe(entered.set)
                await left.wait()

        using = asyncio.create_task(_on(opened.loop, use()), name=f"using {worker.name}")
        using.add_done_callback(lambda _: entered.set())
        try:
            await entered.wait()
            if using.done():
                using.result()
            yield
        finally:
            worker.lose()
            if not entered.is_set():
                using.cancel()
            elif not using.done():
                with contextlib.suppress(RuntimeError):  # its event loop has ended, which ends the use as well
                    opened.loop.call_soon_threadsafe(left.set)
            await asyncio.gather(using, return_exceptions=True)


def _tag(kind: type[RunRole]) -> str:
    return str(kind.__struct_config__.tag)


async def _on(loop: asyncio.AbstractEventLoop, doing: Coroutine[Any, Any, object]) -> None:
    """Awaits something on another event loop. Raises `ShoalError` when that ends meanwhile, or has ended."""
    ends = ShoalError("the run ends, or goes on from its log")
    try:
        given = asyncio.run_coroutine_threadsafe(doing, loop)
    except RuntimeError:
        doing.close()
        raise ends from None
    try:
        await asyncio.wrap_future(given)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ends from None


async def _message(socket: WebSocket) -> bytes:
    """The next message. Raises `WebSocketDisconnect`."""
    given = await socket.receive()
    if given["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    return given.get("bytes") or (given.get("text") or "").encode()


async def _send(socket: WebSocket, message: object) -> None:
    """Sends a message as JSON text."""
    await socket.send_text(msgspec.json.encode(message).decode())
