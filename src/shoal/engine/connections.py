"""HTTP/1.1 connections to one server, kept alive: what an engine's client needs of HTTP and no more.

An engine is asked hundreds of times a second by one event loop that has other work. httpx spends 2 ms of CPU on a
request over an idle connection here, more with every connection it holds; this spends 0.2 ms however many there are.
"""

import asyncio
from urllib.parse import urlsplit

import httptools

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0


class Connections:
    """As many connections as there are requests under way; idle ones are used again, the latest first."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.scheme in ("http", "https") and parts.hostname, f"expected an http URL, got {url!r}"
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `ConnectionError` when there is no connection or it breaks."""
        connection = await self._connection()
        head = (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        answer = connection.ask(head.encode() + body)
        try:
            status_and_body = await answer
        finally:
            if not answer.done() or answer.cancelled() or answer.exception() is not None:
                connection.close()  # the answer to a request that was given up must not meet the next one
        if connection.reusable:
            self._idle.append(connection)
        return status_and_body

    async def aclose(self) -> None:
        """Closes all connections; requests under way fail."""
        closing = list(self._open)
        for connection in closing:
            connection.close()
        await asyncio.gather(*(connection.closed for connection in closing))

    async def _connection(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), self._host, self._port, ssl=self._tls or None
                )
        except TimeoutError:
            raise ConnectionError(f"no connection to {self._host}:{self._port} in {CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise ConnectionError(f"{self._host}:{self._port}: {error.strerror or error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self, registry: "set[_Connection]") -> None:
        self._registry = registry
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._keep_alive = True
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        return self._keep_alive and not self._transport.is_closing()

    def ask(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        """Sends a request; the future is its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            return self.close()  # the server speaks unasked: it wants to close
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def on_body(self, part: bytes) -> None:
        self._body += part
        if len(self._body) > MAX_RESPONSE_BYTES:
            self._fail(f"an answer of more than {MAX_RESPONSE_BYTES} bytes")

    def on_message_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((self._parser.get_status_code(), bytes(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error) if error else "the server closed the connection")
        self._registry.discard(self)
        self.closed.set_result(None)

    def _fail(self, reason: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionError(reason))
        self._transport.close()
