"""JSON questions to an HTTP server of another project, with its failures as `EngineError`s."""

import asyncio
import contextlib
from typing import TypeVar

import msgspec

from shoal.engine.connections import Connections
from shoal.errors import EngineUnavailable, RequestRefused

LONGEST_WORDS = 400
BACKOFFS_S = (0.1, 0.2)
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding foreign JSON raises: another shape, no UTF-8, deep nesting."""

T = TypeVar("T")


class Asking:
    """Questions to one server."""

    def __init__(self, url: str, *, timeout_s: float = 3600.0) -> None:
        """`timeout_s` bounds the wait for one answer, queueing included."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._connections = Connections(url)

    async def status(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of an answer, whatever they are. Raises `EngineUnavailable` when there is none."""
        data = b"" if body is None else msgspec.json.encode(body)
        for backoff_s in (*BACKOFFS_S, None):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._connections.request(method, path, data)
            except TimeoutError:
                raise EngineUnavailable(f"no answer from {self.url}{path} in {self._timeout_s:g} s") from None
            except ConnectionError as error:  # as when a server closes a connection that was idle
                if backoff_s is None:
                    raise EngineUnavailable(f"no engine at {self.url}: {error}") from error
                await asyncio.sleep(backoff_s)
        raise AssertionError("the loop returns or raises")

    async def ask(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        """The answer as `kind`. Raises `RequestRefused` (4xx) or `EngineUnavailable` (anything else)."""
        status, data = await self.status(method, path, body)
        if status == 200:
            return decoded(data, kind, self.url + path)
        message = f"{path}: HTTP {status}: {words(data)}"
        if 400 <= status < 500:
            raise RequestRefused(message)
        raise EngineUnavailable(message)

    async def tell(self, method: str, path: str, body: object = None) -> bytes:
        """The same when only success matters; gives the body as it is."""
        return bytes(await self.ask(method, path, msgspec.Raw, body) if method != "GET" else await self._text(path))

    async def _text(self, path: str) -> bytes:
        status, data = await self.status("GET", path)
        if status != 200:
            raise EngineUnavailable(f"{path}: HTTP {status}: {words(data)}")
        return data

    async def has_route(self, path: str) -> bool:
        """Whether the server has a POST route: asked with GET, FastAPI answers 405 for one and 404 otherwise."""
        status, _ = await self.status("GET", path)
        return status != 404

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._connections.aclose()


def decoded(data: bytes, kind: type[T], url: str) -> T:
    """The JSON answer of `url` as `kind`. Raises `EngineUnavailable` when it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise EngineUnavailable(f"{url} answered something else than expected: {error}") from error


def words(data: bytes) -> str:
    """What an error's body says, in any of the shapes that servers use."""
    text = data.decode(errors="replace")
    try:
        value = msgspec.json.decode(data)
    except UNREADABLE:
        return text[:LONGEST_WORDS]
    for key in ("error", "detail", "message"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return (value if isinstance(value, str) else text)[:LONGEST_WORDS]


def counted(exposition: str, names: dict[str, str]) -> dict[str, int]:
    """Numbers of a Prometheus text by our names for theirs, summed over labels; absent ones are 0.

    >>> counted('# HELP a b\\na_total{x="1"} 2.0\\na_total{x="2"} 3.0\\nab 9.0\\n', {"a_total": "a"})
    {'a': 5}
    """
    sums = dict.fromkeys(names.values(), 0)
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            with contextlib.suppress(ValueError, OverflowError):  # no number, or none that counts anything
                sums[names[name]] += int(float(line.rpartition(" ")[2]))
    return sums
