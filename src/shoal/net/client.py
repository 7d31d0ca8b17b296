"""HTTP client: the only place with retries, with a deadline and a size bound for each answer.

Shoal uses aiohttp, because httpx spends 2 ms of CPU on a request over an idle connection, and more with every
connection it holds. An event loop with other work sends an engine hundreds of requests a second.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Container, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from shoal.errors import EngineUnavailable, RequestRefused

CONNECT_TIMEOUT_S = 10.0
MOST_ANSWER_BYTES = 1 << 30
LONGEST_PAUSE_S = 30.0
LONGEST_WORDS = 400
RETRY_HEADER = "x-stainless-retry-count"
"""Header of OpenAI's retries: when only the reply was lost, a session returns the existing answer."""
CLOSE_S = 1.0
"""Seconds that the other side of a WebSocket has to answer the end of the connection."""
LEASE_S = 5.0
"""Seconds without an answer to pings, after which a run and its role close their connection."""
TOKEN_VARIABLE = "SHOAL_RUN_TOKEN"
"""Name of the environment variable with the run's token, read by the run and by its roles."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors that decoding foreign JSON raises: another shape, no UTF-8, deep nesting."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """Number and timing of a request's retries; the request must be safe to repeat."""

    tries: int | None = 3
    """Tries in all; None retries until the caller cancels."""
    pause_s: float = 0.1
    """Pause before the second try; each later one is twice as long."""
    timeouts: bool = False
    """Whether a timeout is retried, besides a broken connection."""
    statuses: Callable[[int], bool] = lambda status: False
    """Predicate of the statuses that are retried."""


ONCE = Retry(tries=1)


def session(limit: int = 0) -> aiohttp.ClientSession:
    """Session that keeps connections alive: up to `limit`, or without a bound for 0."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


def authorization(token: str) -> dict[str, str]:
    """Header that carries a token, which a file may have ended with a line; empty without a token."""
    return {"Authorization": f"Bearer {token.strip()}"} if token else {}


async def exchange(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    most_bytes: int = MOST_ANSWER_BYTES,
    retry: Retry = Retry(),
) -> tuple[int, bytes]:
    """Sends a request and returns status and body of the answer; `timeout_s` bounds each try.

    Raises `EngineUnavailable` when no try got an answer.
    """
    last = None
    for tried in itertools.count(1):
        if http.closed:  # during a pause or before the first try
            raise EngineUnavailable(f"{url} is no longer asked: the client was closed")
        given = {"Content-Type": "application/json", **headers}
        if tried > 1:
            given[RETRY_HEADER] = str(tried - 1)
        try:
            async with asyncio.timeout(timeout_s), http.request(method, url, data=body, headers=given) as reply:
                last = reply.status, await _bounded(reply, most_bytes)
            if not retry.statuses(last[0]):
                return last
        except (aiohttp.ClientError, OSError) as error:  # for example, the server closed an idle connection
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                failure, last = f"no answer from {url} in {timeout_s:g} s", None
                if not retry.timeouts:
                    break
            else:
                failure, last = f"no answer from {url}: {error or type(error).__name__}", None
        if tried == retry.tries:
            break
        await asyncio.sleep(min(retry.pause_s * 2.0 ** min(tried - 1, 32), LONGEST_PAUSE_S))
    if last is not None:
        return last
    raise EngineUnavailable(failure)


async def _bounded(reply: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    data = bytearray()
    async for part in reply.content.iter_any():
        data += part
        if len(data) > most_bytes:
            raise aiohttp.ClientError(f"expected at most {most_bytes} bytes, got more")
    return bytes(data)


class Client:
    """JSON client of one server."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 3600.0,
        retry: Retry = Retry(),
        refusals: Container[int] = range(400, 500),
    ) -> None:
        """`timeout_s` bounds the wait for one answer, queueing included; `refusals` are permanent error statuses."""
        self.url = url.rstrip("/")
        self._headers = authorization(token)
        self._timeout_s = timeout_s
        self._retry = retry
        self._refusals = refusals
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def status(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Sends a request and returns status and body, of errors too.

        Raises `EngineUnavailable` without an answer.
        """
        opened = self._opened()
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        return await exchange(
            opened, method, self.url + path, data, self._headers, timeout_s=self._timeout_s, retry=self._retry
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineUnavailable(f"{self.url} is no longer asked: the client was closed")
        if self._session is None:  # it belongs to the running loop, so it cannot be made earlier
            self._session = session()
        return self._session

    async def ask(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        """Sends a request and returns the answer as `kind`.

        Raises `RequestRefused` (a status of `refusals`) or `EngineUnavailable` (otherwise).
        """
        return decoded(await self._answer(method, path, body), kind, self.url + path)

    async def _answer(self, method: str, path: str, body: object) -> bytes:
        """Answer of a request that succeeded. Raises as `ask` does."""
        status, data = await self.status(method, path, body)
        if status == 200:
            return data
        message = f"{path}: HTTP {status}: {words(data)}"
        if status in self._refusals:
            raise RequestRefused(message)
        raise EngineUnavailable(message)

    async def lines(self, path: str, kind: type[T], body: object) -> AsyncGenerator[T, None]:
        """Posts `body` and yields each line of the answer as `kind`, as it comes; never retried.

        Leaving the iterator closes the connection. Raises as `ask` does.
        """
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            async with self._opened().post(self.url + path, data=msgspec.json.encode(body), headers=headers) as reply:
                if reply.status != 200:
                    message = f"{path}: HTTP {reply.status}: {words(await _bounded(reply, MOST_ANSWER_BYTES))}"
                    raise RequestRefused(message) if reply.status in self._refusals else EngineUnavailable(message)
                async with asyncio.timeout(self._timeout_s):
                    rest = b""
                    async for part in reply.content.iter_any():
                        *lines, rest = (rest + part).split(b"\n")
                        for line in lines:
                            yield decoded(line, kind, self.url + path)
        except TimeoutError as error:
            raise EngineUnavailable(f"no whole answer from {self.url} in {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"no answer from {self.url}: {error or type(error).__name__}") from error

    async def post(self, path: str, body: object = None) -> None:
        """Posts `body` and ignores the answer's body. Raises as `ask` does."""
        await self._answer("POST", path, body)

    async def has_route(self, path: str) -> bool:
        """Whether the server has a POST route: to a GET, FastAPI answers 405 if so and 404 otherwise."""
        status, _ = await self.status("GET", path)
        return status != 404

    async def aclose(self) -> None:
        """Closes all connections; requests under way and later ones fail."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


def decoded(data: bytes, kind: type[T], url: str) -> T:
    """JSON answer of `url` as `kind`. Raises `EngineUnavailable` for an answer of another shape."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise EngineUnavailable(f"{url} answered something else than expected: {error}") from error


def words(data: bytes) -> str:
    """Message in an error's body, in any of the shapes that servers use."""
    text = data.decode(errors="replace")
    try:
        value = msgspec.json.decode(data)
    except UNREADABLE:
        return text[:LONGEST_WORDS]
    for key in ("error", "detail", "message"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return (value if isinstance(value, str) else text)[:LONGEST_WORDS]
