"""Response bodies of the Tinker API: names and lists."""

import re
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
from starlette.requests import Request as Http
from starlette.responses import Response

from shoal.net.server import Refused
from shoal.tinker.store import SavedWeights

NAME = re.compile(r"[\w.-]{1,128}")
PLACE = re.compile(r"[0-9]{1,9}")


async def gone(http: Http, error: Exception) -> Response:
    """Answer to a client that has disconnected; it is never read."""
    return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)  # never read


def checked_name(given: str | None, seq_id: int | None) -> str:
    """Name of a checkpoint. Raises `Refused`."""
    name = given or f"unnamed-{seq_id}"
    if NAME.fullmatch(name) is None:
        raise Refused(HTTPStatus.BAD_REQUEST, f"path: expected letters, digits, '.', '_' and '-'; got {name[:80]!r}")
    return name


def encoded(value: object) -> str:
    """JSON text of a value."""
    return msgspec.json.encode(value).decode()


def iso_time(seconds: float) -> str:
    """Time in the API's form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def checkpoint(checkpoint: SavedWeights) -> dict[str, object]:
    """Saved weights in the API's form."""
    return {
        "checkpoint_id": checkpoint.path.split("/", 3)[3],
        "checkpoint_type": checkpoint.kind,
        "time": iso_time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "expires_at": None if checkpoint.expires is None else iso_time(checkpoint.expires),
    }


def page(http: Http, items: list[dict[str, object]]) -> list[dict[str, object]]:
    """Part of a list that the request asks for."""
    at = cursor(http, len(items))
    return items[at["offset"] :][: at["limit"]]


def cursor(http: Http, total: int) -> dict[str, int]:
    """Place of that part in the list. Raises `Refused`."""
    places = {name: http.query_params.get(name, default) for name, default in (("offset", "0"), ("limit", "20"))}
    for name, given in places.items():
        if PLACE.fullmatch(given) is None:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{name}: expected a whole number, got {given[:80]!r}")
    return {**{name: int(given) for name, given in places.items()}, "total_count": total}
