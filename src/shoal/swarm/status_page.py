"""The status page shows a peer's newest status in a browser: `shoal swarm status RUN --page`.

    GET /             the page; also status.css and status.js
    GET /api/status   the newest status.json of the peer

Names of peers and models leave as JSON, and the script shows them as text.
"""

from collections.abc import Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.server import HANDLERS, PAGE_HEADERS, Refused, guarded, json

_STATIC = {
    "/": ("status.html", "text/html"),
    "/status.css": ("status.css", "text/css"),
    "/status.js": ("status.js", "text/javascript"),
}


def status_page(read: Callable[[], dict[str, object] | None]) -> Starlette:
    """The application; `read` gives the newest status, or None before the first."""

    def status(_: Request) -> Response:
        values = read()
        if values is None:
            raise Refused(404, "this peer has written no status yet")
        return json(values, headers=PAGE_HEADERS)

    return Starlette(
        routes=[*(Route(path, _static(*file)) for path, file in _STATIC.items()), Route("/api/status", status)],
        middleware=[Middleware(guarded)],
        exception_handlers=HANDLERS,
    )


def _static(name: str, kind: str) -> Callable[[Request], Response]:
    data = files("shoal.swarm").joinpath("static", name).read_bytes()
    return lambda _: Response(data, 200, PAGE_HEADERS, kind)
