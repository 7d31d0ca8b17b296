"""Access checks and limits of every HTTP server.

`guarded` wraps an application: it checks the Host header, the token and the content type before reading anything.
`body` and `decoded` read a request within a size and a time. `serving` bounds an application's connections, headers and
idle time. The errors of `shoal.errors` carry their HTTP status.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import mimetypes
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import NoReturn, TypedDict, TypeVar, Unpack

import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from shoal.errors import ShoalError
from shoal.net.client import CLOSE_S
from shoal.net.listening import TLSFiles, listening_socket, url_of

JSON = "application/json"
HOSTS_VARIABLE = "SHOAL_HOSTS"
"""Environment variable with more names, separated by commas, under which clients reach these servers."""
PROXIES_VARIABLE = "FORWARDED_ALLOW_IPS"
"""Environment variable of uvicorn: addresses of proxies whose X-Forwarded-For is trusted; none by default."""
HEADERS_TIMEOUT_S = 15.0
"""Seconds from a connection's start, or from the first byte of a later request, to the end of its headers."""
BODY_TIMEOUT_S = 60.0
MOST_HEADER_BYTES = 1 << 16
MOST_FRAME_BYTES = 64 << 20
"""Most bytes of a WebSocket's message."""
DESCRIPTORS = 1 << 16
"""Most descriptors, if the system allows as many; three quarters of them may be connections."""
PER_ADDRESS = 64
"""Connections that one address may hold to a public server."""
_LOOK = files("shoal.net").joinpath("look.css").read_bytes()
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of a page that shows foreign text: only its own scripts, styles and requests are allowed."""
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

T = TypeVar("T")


class Refused(ShoalError):
    """Refusal of a request, with its HTTP status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.http_status = status


def json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON response."""
    return Response(msgspec.json.encode(value), status, headers, JSON)


def exposition(prefix: str, counters: Mapping[str, float], gauges: Mapping[str, float]) -> Response:
    """Metrics in Prometheus' text format; a gauge's name may carry labels."""
    lines = [f"# TYPE {prefix}_{name}_total counter\n{prefix}_{name}_total {value}" for name, value in counters.items()]
    for name, value in gauges.items():
        lines += [] if "{" in name else [f"# TYPE {prefix}_{name} gauge"]
        lines.append(f"{prefix}_{name} {value}")
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def refusal(error: Exception) -> Response:
    """Response to a request that failed: `{"error": {"message": ..., "code": ...}}`."""
    if isinstance(error, HTTPException):
        status, why = error.status_code, error.detail
    elif isinstance(error, ShoalError):
        status, why = error.http_status, str(error)
    else:
        status, why = 500, f"{type(error).__name__}: {error}"
    return json({"error": {"message": why, "code": status}}, status, PAGE_HEADERS)


async def look(_: Request) -> Response:
    """Serves look.css, the style sheet of all pages."""
    return Response(_LOOK, 200, PAGE_HEADERS, "text/css")


def page_files(package: str) -> list[Route]:
    """Routes of a page: the files in the package's folder `static`, with index.html at /, and look.css."""
    routes = [Route("/look.css", look)]
    for file in files(package).joinpath("static").iterdir():
        answer = partial(Response, file.read_bytes(), 200, PAGE_HEADERS, mimetypes.guess_type(file.name)[0])
        routes.append(Route(f"/{file.name.removesuffix('index.html')}", lambda _, answer=answer: answer()))
    return routes


async def _refused(_: Request, error: Exception) -> Response:
    return refusal(error)


HANDLERS: dict[type[Exception], ExceptionHandler] = {ShoalError: _refused, HTTPException: _refused}
"""Handlers for Starlette's `exception_handlers`."""


def address_of(http: Request) -> str:
    """Network address of a client; of IPv6 the first 64 bits, as one host may have all others."""
    host = http.client.host if http.client else ""
    with contextlib.suppress(ValueError):  # a proxy may give any text
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address.packed[:8] + bytes(8), 64)))
    return host


async def body(http: Request, most_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Reads a request's body. Raises `Refused` at the first byte too many, or when reading takes too long."""
    data = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in http.stream():
                data += part
                if len(data) > most_bytes:
                    raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: expected at most {most_bytes} bytes")
    except TimeoutError:
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"body: expected all of it within {timeout_s:g} s") from None
    return bytes(data)


def decoded(data: bytes, kind: type[T]) -> T:
    """JSON body as `kind`; an empty body is `{}`. Raises `Refused`, naming the field."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"body: {error}") from error


async def disconnected(http: Request) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    receive: Callable[[], Awaitable[object]] = http.receive
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return


class guarded:  # noqa: N801 - an ASGI middleware, used as a function
    """Passes only permitted requests to an application.

    A page of another site can make a browser send requests that need no preflight, or any request to a name that
    resolves here. So a body must be JSON, and the Host header must be an address, this machine's name, or one of
    `SHOAL_HOSTS`. A request with the token may use any host.
    """

    def __init__(
        self, app: ASGIApp, *, token: str = "", free: Collection[str] = (), media_type: str = JSON, host: str = ""
    ) -> None:
        """With a `token`, all paths but the `free` ones require it.

        `host` is the server's listening address as the user set it. An empty `media_type` lets every type pass, for an
        application whose clients send a key in a header that needs a preflight.
        """
        self._app = app
        self._token = f"Bearer {token.strip() or token}".encode() if token else b""  # a blank token opens nothing
        self._free = frozenset(free)
        self._media_type = media_type.encode()
        given = os.environ.get(HOSTS_VARIABLE, "").split(",")
        self._hosts = {name.strip().lower() for name in ("localhost", socket.gethostname(), host, *given)} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses one request, or passes it on."""
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope)
            except Refused as error:
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        known = self._token != b"" and hmac.compare_digest(headers.get(b"authorization", b""), self._token)
        if not known:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
        if self._token and not known and scope["path"] not in self._free:
            raise Refused(HTTPStatus.UNAUTHORIZED, "expected the server's token as Authorization: Bearer TOKEN")
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["type"] == "websocket" and b"origin" in headers:  # browsers open one to any site without a preflight
            raise Refused(HTTPStatus.FORBIDDEN, "origin: expected none, WebSockets are not for pages")
        if self._media_type and scope.get("method", "GET") != "GET" and has_body and kind != self._media_type:
            expected = self._media_type.decode()
            why = f"content-type: expected {expected}, got {kind.decode('latin-1') or 'none'}"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)

    def _check_host(self, header: str) -> None:
        name = header.lower()
        if not name.endswith("]"):  # the port; an IPv6 address without a port has colons as well
            name = name.rpartition(":")[0] or name
        if not name or name in self._hosts:  # browsers always send a Host
            return
        try:
            ipaddress.ip_address(name.strip("[]"))  # an address, unlike a name, cannot be rebound
        except ValueError:
            known = ", ".join(sorted(self._hosts))
            why = f"host: expected an address or one of {known}; {HOSTS_VARIABLE} adds names; got {header[:80]!r}"
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, why) from None


class Bounds(TypedDict, total=False):
    """Bounds of a server."""

    idle_s: int
    """Seconds that a connection may be idle, by default 5."""
    grace_s: int
    """Seconds that shutdown waits for answers under way; unset waits until they are sent."""
    per_address: int
    """Connections of one address."""
    headers_timeout_s: float
    silence_s: float
    """Serves WebSockets, and closes those without an answer to a ping for so many seconds."""


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listening: socket.socket | None = None,
    tls: TLSFiles | None = None,
    **bounds: Unpack[Bounds],
) -> AsyncIterator[str]:
    """Serves `app` within the block, on its event loop; yields the URL once it answers. It handles no signals.

    It listens at `host` and `port`, or on the socket `listening`. Raises `ConfigError` for an address that is taken.
    """
    with listening or listening_socket(host, port) as at:
        server = _QuietServer(uvicorn_config(app, tls=tls, **bounds))
        running = asyncio.create_task(server.serve(sockets=[at]), name="HTTP server")
        running.add_done_callback(lambda _: server.up.set())
        try:
            await server.up.wait()
            yield url_of(at, tls)
        finally:
            server.should_exit = True
            await running


async def until_cancelled() -> NoReturn:
    """Waits until it is cancelled, for example by a signal."""
    await asyncio.Event().wait()
    raise AssertionError


def uvicorn_config(app: ASGIApp, *, tls: TLSFiles | None = None, **bounds: Unpack[Bounds]) -> uvicorn.Config:
    """Configuration that bounds connections, headers and idle time of `app`, and by default trusts no proxy."""
    silence_s = bounds.get("silence_s", 0.0)
    limits = {
        "most": _descriptors() * 3 // 4,
        "per_address": bounds.get("per_address"),
        "headers_timeout_s": bounds.get("headers_timeout_s", HEADERS_TIMEOUT_S),
    }
    return uvicorn.Config(
        app,
        http=type("_BoundedHere", (_Bounded,), limits),
        ws=_Leased if silence_s else "none",
        ws_max_size=MOST_FRAME_BYTES,
        ws_ping_interval=0.4 * silence_s,
        ws_ping_timeout=0.6 * silence_s,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=bounds.get("idle_s", 5),
        timeout_graceful_shutdown=bounds.get("grace_s"),
        proxy_headers=PROXIES_VARIABLE in os.environ,  # uvicorn reads it
        server_header=False,
        **(tls or {}),
    )


class _QuietServer(uvicorn.Server):
    """Server that leaves signals to its process; `up` is set once it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, and listens."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Does nothing."""
        yield


def _descriptors() -> int:
    """Raises this process's descriptor limit as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


class _Leased(WebSocketsSansIOProtocol):
    """WebSocket that ends at once when a ping is not answered, and `CLOSE_S` after its end was sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = CLOSE_S

    def keepalive_timeout(self) -> None:
        self.transport.abort()  # closing would wait for as long as the other side takes no bytes


class _Bounded(HttpToolsProtocol):
    """Connection of uvicorn that limits the wait for headers and the number of connections."""

    most: int
    per_address: int | None
    headers_timeout_s: float
    _late: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most or self._is_greedy():
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._late = self.loop.call_later(self.headers_timeout_s, transport.abort)

    def _is_greedy(self) -> bool:
        if self.per_address is None or self.client is None:
            return False
        clients = [other.client for other in self.connections if isinstance(other, _Bounded) and other.client]
        return sum(host == self.client[0] for host, _ in clients) > self.per_address

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # upgraded to a WebSocket
            self._end_wait()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
            return
        if self.cycle is None or not self.cycle.more_body:  # otherwise it is the rest of a refused body
            self._head_bytes += len(data)
        if self._head_bytes > MOST_HEADER_BYTES:
            self.transport.abort()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self.headers_timeout_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        """Ends the wait for a request's headers."""
        self._head_bytes = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None
