"""Routes: a lookup of the endpoint by path, where Starlette's router tries one pattern after the other."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from shoal.errors import ShoalError

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Table: TypeAlias = Mapping[str, tuple[str, Endpoint]]
"""Method and endpoint of each path."""

SESSION = "/s/"


class Routes:
    """ASGI application. In `/s/<token>/...` the token is the request's path parameter `token`."""

    def __init__(
        self,
        common: Table,
        of_sessions: Table,
        *,
        refused: Callable[[Request, Exception], Response],
        lifetime: Callable[[object], AbstractAsyncContextManager[None]],
    ) -> None:
        """`refused` turns errors that clients may see into responses; `lifetime` lasts while requests are served."""
        self._common = common
        self._of_sessions = of_sessions
        self._refused = refused
        self._others = Router(lifespan=lifetime)  # also closes web sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        http = Request(scope, receive, send)
        try:
            response = await self._endpoint(scope)(http)
        except (ShoalError, HTTPException, ClientDisconnect) as error:
            response = self._refused(http, error)
        await response(scope, receive, send)

    def _endpoint(self, scope: Scope) -> Endpoint:
        path, table = str(scope["path"]).rstrip("/"), self._common
        if path.startswith(SESSION):
            token, slash, rest = path.removeprefix(SESSION).partition("/")
            scope["path_params"] = {"token": token}
            path, table = slash + rest, self._of_sessions
        if path not in table:
            raise HTTPException(404)
        method, endpoint = table[path]
        if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
            raise HTTPException(405)
        return endpoint
