"""Home page of a model server: the model, an example request, and a chat box."""

from html import escape
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from shoal.gateway.chat import example
from shoal.net.server import PAGE_HEADERS

_HOME = files("shoal.gateway").joinpath("home.html").read_text()
_TALK = files("shoal.gateway").joinpath("talk.js").read_bytes()


async def home_page(http: Request, *, model: str, longest: int, chats: bool) -> Response:
    """Page of `model` with a context of `longest` tokens; without `chats` the model continues texts."""
    path, body = example(model, chats=chats)
    url = str(http.base_url).rstrip("/")
    values = {"model": model, "url": url, "longest": str(longest), "asked": body, "path": path}
    words = ("Talk with the model", "Your message") if chats else ("Let the model continue a text", "Your text")
    title, label = words
    page = _HOME.format(title=title, label=label, **{name: escape(value) for name, value in values.items()})
    return Response(page, 200, PAGE_HEADERS, "text/html")


async def script(_: Request) -> Response:
    """Serves talk.js, the script of the page."""
    return Response(_TALK, 200, PAGE_HEADERS, "text/javascript")
