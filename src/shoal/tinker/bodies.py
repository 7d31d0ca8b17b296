"""Bodies and lists of the Tinker API's routes: what they read, and in which form they answer."""

import re
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as Http
from starlette.responses import Response

from shoal.net.server import Refused, body
from shoal.tinker.store import SavedWeights

MOST_BYTES = 64 << 20
NAME = re.compile(r"[\w.-]{1,128}")

M = TypeVar("M", bound=BaseModel)


async def gone(http: Http, error: Exception) -> Response:
    """Answer to a client that has left: nobody reads it."""
    return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)  # nobody reads it


async def read(http: Http, kind: type[M]) -> M:
    """Reads a request of the API. Raises `Refused`, naming the field."""
    return validated(await body(http, MOST_BYTES), kind)


def validated(data: bytes, kind: type[M]) -> M:
    """Decodes a body of the API. Raises `Refused`, naming the field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"{where or 'body'}: {first['msg']}") from None


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
    query = http.query_params
    try:
        return {"offset": int(query.get("offset", 0)), "limit": int(query.get("limit", 20)), "total_count": total}
    except ValueError:
        raise Refused(HTTPStatus.BAD_REQUEST, "limit and offset: expected whole numbers") from None
