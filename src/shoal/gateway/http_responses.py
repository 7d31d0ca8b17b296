"""Responses over HTTP: an answer or an error as a body, or as the events of a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from shoal.errors import ShoalError
from shoal.gateway.chat import Body, Refusal
from shoal.gateway.responses import failure_event
from shoal.gateway.sessions import ContextOverflow, Session
from shoal.gateway.token_tree import Generation

_encoder = msgspec.json.Encoder()


ANTHROPIC_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


@dataclass(frozen=True, slots=True)
class RenderedReply:
    """Functions that turn a generation into the response to one request."""

    body: Callable[[Generation], Body]
    events: Callable[[Generation], Iterable[Body]] | None
    """Events of the stream; None when the client wants no stream."""
    named: bool = False
    """Whether events carry their type as name, and no mark ends the stream."""


def error_body(error: ShoalError, status: int, path: str) -> Body:
    """Error body in the form of the API that `path` belongs to."""
    if "/v1/messages" in path:
        other = "overloaded_error" if status == 503 else "invalid_request_error"
        return {"type": "error", "error": {"type": ANTHROPIC_KINDS.get(status, other), "message": str(error)}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = error.field if isinstance(error, Refusal) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": _code(error)}}


async def streamed(
    http: Request, session: Session, task: "asyncio.Future[Generation]", reply: RenderedReply, keep_alive_s: float
) -> AsyncIterator[bytes]:
    """Streams the events of an answer, with comments until it is ready; a late error becomes an event."""
    assert reply.events is not None
    path = http.url.path
    while not task.done():
        yield b": keep-alive\n\n"
        await asyncio.wait({task}, timeout=keep_alive_s)
    try:
        generation = task.result()
    except ShoalError as error:
        status = error.http_status
        late = failure_event(str(error), _code(error)) if "/v1/responses" in path else error_body(error, status, path)
        yield _event(late, named=reply.named)
        return
    if has_left(http):
        return
    for event in reply.events(generation):
        yield _event(event, named=reply.named)
    if not reply.named:
        yield b"data: [DONE]\n\n"
    session.deliver(generation)


def has_left(http: Request) -> bool:
    """Whether the server knows by now that the client of a fully read request has disconnected.

    The function asks once and does not wait. Starlette's own `is_disconnected` begins to wait and cancels that, which
    takes two more rounds of the event loop, behind all other requests.
    """
    receiving = http.receive().__await__()
    try:
        next(receiving)
    except StopIteration as message:
        return bool(message.value["type"] == "http.disconnect")
    finally:
        receiving.close()
    return False


def _event(body: Body, *, named: bool) -> bytes:
    data = b"data: " + _encoder.encode(body) + b"\n\n"
    return b"event: " + str(body["type"]).encode() + b"\n" + data if named else data


def _code(error: ShoalError) -> str | None:
    return "context_length_exceeded" if isinstance(error, ContextOverflow) else None
