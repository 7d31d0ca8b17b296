"""Errors in the form of the request's API, as bodies and as events of a stream."""

from starlette.exceptions import HTTPException

from shoal.errors import ContextOverflow, SessionError, ShoalError
from shoal.gateway.dialects import Body, Dialect, R, event_bytes
from shoal.gateway.fields import Refusal

ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}

NO_THREADS: Body = {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""Makes the tool runner of Anthropic's SDK send whole conversations; by default it asks the server to keep them."""


class ModelNotFound(SessionError):
    """Error of a request for a model that is not served (HTTP 404)."""

    http_status = 404


def error_body(error: Exception, status: int, path: str) -> Body:
    """Error body in the form of the API that `path` belongs to."""
    said = error.detail if isinstance(error, HTTPException) else str(error)
    if "/v1/messages" in path:
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error")
        is_thread = isinstance(error, Refusal) and error.field == "thread"
        return {"type": "error", "error": {"type": kind, "message": said, **(NO_THREADS if is_thread else {})}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = error.field if isinstance(error, Refusal) else "model" if isinstance(error, ModelNotFound) else None
    return {"error": {"message": said, "type": kind, "param": param, "code": _code(error)}}


def late_event(dialect: Dialect[R], path: str, error: ShoalError) -> bytes:
    """Event that reports an error in a stream."""
    late = error_body(error, error.http_status, path)
    if dialect.named and "/v1/messages" not in path:
        late = {"type": "error", "code": _code(error), "message": str(error), "param": None, "sequence_number": 0}
    return event_bytes(late, named=dialect.named)


def _code(error: Exception) -> str | None:
    if isinstance(error, ModelNotFound):
        return "model_not_found"
    return "context_length_exceeded" if isinstance(error, ContextOverflow) else None
