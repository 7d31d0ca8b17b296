"""Gateway routes for OpenAI and Anthropic, under `/v1` (the session is the API key) and `/s/<token>/v1`."""

import asyncio
import contextlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from shoal.errors import ContextOverflow, SessionError, ShoalError
from shoal.gateway.anthropic import MESSAGES, conversation_of
from shoal.gateway.chat import CHAT, TEXT, TOKENS
from shoal.gateway.dialects import Body, Dialect, R, Refusal, Reply, event_bytes
from shoal.gateway.registry import SessionBounds, Sessions, export
from shoal.gateway.request_log import FREE_PATHS, RequestRecord
from shoal.gateway.responses import RESPONSES
from shoal.gateway.sessions import DEFAULTS, OpenRequest, Session, SessionContext, SessionOver
from shoal.gateway.token_tree import Generation
from shoal.interfaces import Engine, ModelServer
from shoal.net.client import RETRY_HEADER
from shoal.net.server import body, decoded, exposition, guarded, json, look

if TYPE_CHECKING:
    from shoal.model.chat_template import ChatRenderer

MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 10.0
EVICTION_PERIOD_S = 5.0
SESSION = "/s/"
UNKNOWN = "session: expected the URL or API key of an open session; POST /v1/sessions opens one"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
DIALECTS: Mapping[str, Dialect[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
LateError: TypeAlias = Callable[[ShoalError], bytes]
"""Function from an error to the event that reports it in a stream."""
PlainEndpoint: TypeAlias = Callable[[Request, bytes, RequestRecord, LateError], Awaitable[Response]]
PlainEvents: TypeAlias = Callable[[Dialect[Any], Any, RequestRecord, LateError], Awaitable[Response]]
"""Streams the answer to a request of an API with named events."""


class ModelNotFound(SessionError):
    """Error of a request for a model that is not served (HTTP 404)."""

    http_status = 404


class _Named(msgspec.Struct):
    """Field of all requests that names the model."""

    model: str | None = None


class Unauthorized(SessionError):
    """Error of a token that names no session (HTTP 401)."""

    http_status = 401


@dataclass(eq=False)
class Gateway:
    """Gateway over sessions; `app` is the ASGI application, `sessions` the registry."""

    engine: Engine
    renderer: "ChatRenderer"
    _: KW_ONLY
    max_model_len: int
    """Most tokens, prompt and answer together, that the engine takes."""
    model: str = "shoal"
    also_called: Collection[str] = ()
    """Further names by which a request without a session may call the model."""
    model_server: ModelServer | None = None
    """Engine that answers requests without a session; without it they get 401."""
    on_request: Callable[[RequestRecord], None] | None = None
    """Gets each request once it is answered."""
    admin_key: str = ""
    """Key that a request must send to open sessions, read metrics, or ask without a session; empty for no key."""
    bounds: SessionBounds = field(default_factory=SessionBounds)
    max_body_bytes: int = MAX_BODY_BYTES
    keep_alive_s: float = KEEP_ALIVE_S
    host: str = ""
    """Address on which the user has the gateway listen."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="render")
        context = SessionContext(self.engine, self.renderer, self.max_model_len, pool, self.clock)
        self.sessions = Sessions(context, self.bounds)
        self._plain: dict[str, PlainEndpoint] = {}
        self._plain_events: PlainEvents | None = None
        of_pages: dict[str, tuple[str, Endpoint]] = {}
        if self.model_server is not None:
            from shoal.gateway.plain_server import PlainServer  # the gateway of a training run has no use for it

            plain = PlainServer(self.model_server, context, self.model, self.keep_alive_s)
            self._plain = {"/v1/chat/completions": plain.chat, "/v1/completions": plain.text}
            self._plain_events = plain.events
            of_pages = {"": ("GET", partial(self._admitted, plain.home)), "/look.css": ("GET", look)}
        self._others = Router(lifespan=lambda _: self.lifetime())  # also closes web sockets
        of_models: dict[str, tuple[str, Endpoint]] = {
            **{path: ("POST", partial(self._generate, dialect)) for path, dialect in DIALECTS.items()},
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/models": ("GET", self._models),
        }
        self._of_sessions = {**of_models, "/end": ("POST", self._end)}
        self._common = {
            **of_models,
            **of_pages,
            "/v1/sessions": ("POST", self._open),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }
        self.app = guarded(self._answer, host=self.host)

    @contextlib.asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        """Evicts idle sessions until the block ends, then cancels all work under way. A server of `app` enters it."""
        evicting = asyncio.create_task(self._evicting(), name="eviction of sessions")
        yield
        under_way = [evicting, *self.sessions.context.tasks]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self.sessions.context.pool.shutdown(wait=True)

    async def _evicting(self) -> None:
        while True:
            await asyncio.sleep(min(self.sessions.bounds.idle_s / 4, EVICTION_PERIOD_S))
            await self.sessions.evict()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        http, record = Request(scope, receive, send), RequestRecord(str(scope["method"]), _shown(str(scope["path"])))
        scope["shoal.record"], began_s = record, self.clock()
        try:
            response = await self._endpoint(scope)(http)
        except (ShoalError, HTTPException, ClientDisconnect) as error:
            response = self._refusal(http, error)
            record.error = str(error) or type(error).__name__
        try:
            await response(scope, receive, send)
            record.status = response.status_code
        finally:
            record.duration_s = self.clock() - began_s
            if self.on_request is not None and record.path not in FREE_PATHS:
                self.on_request(record)

    def _endpoint(self, scope: Scope) -> Endpoint:
        """Endpoint of a path, by lookup: Starlette's router would try one pattern after the other."""
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

    async def _open(self, http: Request) -> Response:
        self._admit(http)
        session = self.sessions.open(decoded(await body(http, self.max_body_bytes), OpenRequest))
        url = f"{http.base_url}s/{session.token}"
        urls = {"openai_base_url": f"{url}/v1", "anthropic_base_url": url}
        return json({"session_id": session.token[:8], "api_key": session.token, **urls})

    async def _end(self, http: Request) -> Response:
        session = self._session(http)
        await self.sessions.end(session)
        return json(export(session.tree))

    async def _generate(self, dialect: Dialect[R], http: Request) -> Response:
        """Answers with one body, or with the events of a stream, which begin when the whole answer is sampled."""
        session, record = self._session(http), http.scope["shoal.record"]
        data = await body(http, self.max_body_bytes)
        late = partial(_late_event, dialect, http.url.path)
        if is_plain := self.sessions.get(session.token) is None:
            record.model = self._check_model(data)
            if (plain := self._plain.get(http.url.path.rstrip("/"))) is not None:
                return await plain(http, data, record, late)
        request, created = dialect.request(data, strict=is_plain), int(time.time())
        if is_plain and request.stream and dialect.named and self._plain_events is not None:
            return await self._plain_events(dialect, request, record, late)
        digest = blake2b(f"{http.scope['path']}\0".encode() + data, digest_size=16).hexdigest()
        ask = replace(dialect.ask(request, session.tree), digest=digest, is_retry=_is_retry(http))

        def reply(generation: Generation) -> Reply[R]:
            prompt = session.tree.prompt_ids(generation)
            record.prompt_tokens, record.completion_tokens = len(prompt), len(generation.completion.token_ids)
            record.finish = generation.completion.finish_reason
            return Reply(request, generation, prompt, created, session.tree.name)

        if not request.stream:
            generation = await session.generation(ask)
            answer = json(dialect.body(reply(generation)))
            if not _has_left(http):
                session.tree.deliver(generation.id)
            return answer
        task = asyncio.ensure_future(session.generation(ask))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client may be gone then
        await asyncio.wait({task}, timeout=self.keep_alive_s)
        if task.done():
            task.result()  # early failures have a status of their own
        return StreamingResponse(self._streamed(http, session, task, dialect, reply), media_type="text/event-stream")

    async def _streamed(
        self,
        http: Request,
        session: Session,
        task: "asyncio.Future[Generation]",
        dialect: Dialect[R],
        reply: Callable[[Generation], Reply[R]],
    ) -> AsyncIterator[bytes]:
        """Streams the events of an answer, with comments until it is ready; a late error becomes an event."""
        while not task.done():
            yield b": keep-alive\n\n"
            await asyncio.wait({task}, timeout=self.keep_alive_s)
        try:
            generation = task.result()
        except ShoalError as error:
            yield _late_event(dialect, http.url.path, error)
            return
        if _has_left(http):
            return
        for event in dialect.events(reply(generation)):
            yield event_bytes(event, named=dialect.named)
        if not dialect.named:
            yield b"data: [DONE]\n\n"
        session.tree.deliver(generation.id)

    async def _count_tokens(self, http: Request) -> Response:
        self._session(http)
        request = MESSAGES.request(await body(http, self.max_body_bytes))
        rendered = await self.sessions.context.rendered(conversation_of(request))
        return json({"input_tokens": len(rendered)})

    async def _models(self, http: Request) -> Response:
        self._session(http)
        longest = self.sessions.context.max_model_len
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "shoal", "max_model_len": longest}
        return json({"object": "list", "data": [one]})

    async def _health(self, _: Request) -> Response:
        return json({"status": "ok"})

    async def _metrics(self, http: Request) -> Response:
        self._admit(http)
        context = self.sessions.context
        latencies = sorted(context.latencies_s)
        quantiles = {
            f'latency_seconds{{quantile="{share}"}}': latencies[int(share * (len(latencies) - 1))]
            for share in (0.5, 0.99)
            if latencies
        }
        gauges = {"open_sessions": len(self.sessions), **quantiles}
        return exposition("shoal_gateway", dict(sorted(context.counted.items())), gauges)

    def _session(self, http: Request) -> Session:
        """Session that the URL or the API key names. Raises `Unauthorized` and `SessionOver`."""
        named = http.path_params.get("token")
        token = named or _api_key(http)
        session = self.sessions.get(token)
        if session is not None:
            return session
        if token in self.sessions.closed:
            raise SessionOver(self.sessions.closed[token])
        if named is None and self.model_server is not None:
            self._admit(http)
            return Session(self.sessions.context, DEFAULTS)
        raise Unauthorized(UNKNOWN)

    def _check_model(self, data: bytes) -> str:
        """Model that a request without a session names, if any. Raises `ModelNotFound`."""
        asked = decoded(data, _Named).model or self.model
        if asked != self.model and asked not in self.also_called:
            raise ModelNotFound(f"model: expected {self.model!r}, got {asked!r}; GET /v1/models lists what is served")
        return asked

    def _admit(self, http: Request) -> None:
        """Raises `Unauthorized` for a request without the admin key, where one is set."""
        if self.admin_key and not hmac.compare_digest(_api_key(http).encode(), self.admin_key.encode()):
            raise Unauthorized("api_key: expected the gateway's admin key as Authorization: Bearer KEY")

    async def _admitted(self, endpoint: Endpoint, http: Request) -> Response:
        self._admit(http)
        return await endpoint(http)

    def _refusal(self, http: Request, error: Exception) -> Response:
        """Response to an error."""
        counted = self.sessions.context.counted
        if isinstance(error, ClientDisconnect):  # before its request was complete: no one reads the answer
            counted["half_requests"] += 1
            return Response(status_code=400)
        status = error.status_code if isinstance(error, HTTPException) else getattr(error, "http_status", 500)
        if isinstance(error, ShoalError):
            counted[f"refused_{status}"] += 1
        return json(_error_body(error, status, str(http.scope["path"])), status)


def _error_body(error: Exception, status: int, path: str) -> Body:
    """Error body in the form of the API that `path` belongs to."""
    said = error.detail if isinstance(error, HTTPException) else str(error)
    if "/v1/messages" in path:
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": said}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = error.field if isinstance(error, Refusal) else "model" if isinstance(error, ModelNotFound) else None
    return {"error": {"message": said, "type": kind, "param": param, "code": _code(error)}}


def _late_event(dialect: Dialect[R], path: str, error: ShoalError) -> bytes:
    late = _error_body(error, error.http_status, path)
    if dialect is RESPONSES:
        late = {"type": "error", "code": _code(error), "message": str(error), "param": None, "sequence_number": 0}
    return event_bytes(late, named=dialect.named)


def _code(error: Exception) -> str | None:
    if isinstance(error, ModelNotFound):
        return "model_not_found"
    return "context_length_exceeded" if isinstance(error, ContextOverflow) else None


def _shown(path: str) -> str:
    """Path for the log: a session's key is in its path."""
    if not path.startswith(SESSION):
        return path
    key, slash, rest = path.removeprefix(SESSION).partition("/")
    return f"{SESSION}{key[:8]}...{slash}{rest}"


def _has_left(http: Request) -> bool:
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


def _is_retry(http: Request) -> bool:
    """Whether a client library marks the request as a retry."""
    count = http.headers.get(RETRY_HEADER, "0")
    return count.isdigit() and count != "0"


def _api_key(http: Request) -> str:
    """API key in the header of OpenAI's or Anthropic's clients."""
    return http.headers.get("x-api-key") or http.headers.get("authorization", "")[len("bearer ") :]
