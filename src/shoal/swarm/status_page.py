"""The status page shows a peer's newest status in a browser: `shoal swarm status RUN --page`.

    GET /             the page; also style.css and status.js
    GET /api/status   the newest status.json of the peer

Names of peers and models leave as JSON, and the script shows them as text.
"""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.server import HANDLERS, PAGE_HEADERS, Refused, guarded, json, page_files


def status_page(read: Callable[[], dict[str, object] | None]) -> Starlette:
    """The application; `read` gives the newest status, or None before the first."""

    def status(_: Request) -> Response:
        values = read()
        if values is None:
            raise Refused(404, "this peer has written no status yet")
        return json(values, headers=PAGE_HEADERS)

    return Starlette(
        routes=[*page_files("shoal.swarm"), Route("/api/status", status)],
        middleware=[Middleware(guarded)],
        exception_handlers=HANDLERS,
    )
