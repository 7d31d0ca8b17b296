"""Kept-alive HTTP connections to one server, as many as there are requests under way.

aiohttp instead of httpx, which spends 2 ms of CPU on a request over an idle connection here and more with every
connection it holds; an engine is asked hundreds of times a second by one event loop that has other work.
"""

import aiohttp

CONNECT_TIMEOUT_S = 10.0


class Connections:
    """Requests to one base URL."""

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `ConnectionError` when there is no connection or it breaks."""
        if self._session is None:  # it belongs to the running loop, so it cannot be made earlier
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                headers={"Content-Type": "application/json"},
            )
        try:
            async with self._session.request(method, self._base + path, data=body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        """Closes all connections; requests under way fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None
