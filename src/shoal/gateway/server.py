"""Gateway routes for OpenAI and Anthropic, under `/v1` (the session is the API key) and `/s/<token>/v1`."""

import asyncio
import contextlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from shoal.errors import SessionError, ShoalError
from shoal.gateway.anthropic import MESSAGES, conversation_of
from shoal.gateway.api_errors import ModelNotFound, error_body, late_event
from shoal.gateway.chat import CHAT, TEXT, TOKENS
from shoal.gateway.dialects import Body, Dialect, R, Reply, event_bytes
from shoal.gateway.registry import SessionBounds, Sessions, export
from shoal.gateway.request_log import FREE_PATHS, RequestRecord
from shoal.gateway.responses import RESPONSES
from shoal.gateway.sessions import DEFAULTS, AnswerRequest, OpenRequest, Session, SessionContext, SessionOver
from shoal.gateway.token_tree import Generation
from shoal.interfaces import Engine, ModelServer
from shoal.net.client import RETRY_HEADER
from shoal.net.server import body, decoded, exposition, guarded, json, look

if TYPE_CHECKING:
    from shoal.gateway.plain_server import PlainServer
    from shoal.model.chat_template import ChatRenderer

MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 10.0
EVICTION_PERIOD_S = 5.0
SESSION = "/s/"
MODELS = "/v1/models/"
UNKNOWN = "session: expected the URL or API key of an open session; POST /v1/sessions opens one"
DIALECTS: Mapping[str, Dialect[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


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
        self._started_s = time.time()
        self._plain: PlainServer | None = None
        of_pages: dict[str, tuple[str, Endpoint]] = {}
        if self.model_server is not None:
            from shoal.gateway import home_page, plain_server  # the gateway of a training run has no use for them

            self._plain = plain = plain_server.PlainServer(self.model_server, context, self.model, self.keep_alive_s)
            home = ("GET", partial(self._admitted, plain.home))
            of_pages = {"": home, "/look.css": ("GET", look), "/talk.js": ("GET", home_page.script)}
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
        if path.startswith(MODELS) and path not in table:
            path, table = MODELS, {MODELS: ("GET", partial(self._model, path.removeprefix(MODELS)))}
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
        is_plain, created = self.sessions.get(session.token) is None, int(time.time())
        request, asks = await self._read(dialect, data, session, record, is_plain=is_plain)
        if is_plain and self._plain is not None and (dialect in (CHAT, TEXT) or (request.stream and dialect.named)):
            late = partial(late_event, dialect, http.url.path)
            return await self._plain.answer(http, dialect, request, asks, record, late)
        digest = blake2b(f"{http.scope['path']}\0".encode() + data, digest_size=16).hexdigest()
        asks = [
            replace(ask, digest=f"{digest}{i or ''}", is_retry=_is_retry(http))
            for i, ask in enumerate(ask for ask in asks for _ in range(request.choices))
        ]

        def replies(generations: Sequence[Generation]) -> list[Reply[R]]:
            prompts = [session.tree.prompt_ids(generation) for generation in generations]
            sampled = [generation.completion for generation in generations]
            record.prompt_tokens = sum(map(len, prompts[:: request.choices]))
            record.completion_tokens = sum(len(one.token_ids) for one in sampled)
            record.finish = ",".join(sorted({one.finish_reason for one in sampled}))
            return [
                Reply(request, generation, prompt, created, session.tree.name, index)
                for index, (generation, prompt) in enumerate(zip(generations, prompts, strict=True))
            ]

        answering = asyncio.gather(*(session.generation(ask) for ask in asks))
        if not request.stream:
            generations = await answering
            answer = json(dialect.body(replies(generations)))
            if not _has_left(http):
                _deliver(session, generations)
            return answer
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client may be gone then
        await asyncio.wait({answering}, timeout=self.keep_alive_s)
        if answering.done():
            answering.result()  # early failures have a status of their own
        events = self._streamed(http, session, answering, dialect, replies)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _read(
        self, dialect: Dialect[R], data: bytes, session: Session, record: RequestRecord, *, is_plain: bool
    ) -> tuple[R, Sequence[AnswerRequest]]:
        """Request of a body, and its prompts, read beside the event loop if they are long. Raises `SessionError`."""

        def read() -> tuple[R, Sequence[AnswerRequest]]:
            if is_plain:
                record.model = self._check_model(data)
            request = dialect.request(data, is_plain=is_plain)
            return request, [dialect.ask(one, session.tree) for one in dialect.each(request)]

        return await self.sessions.context.computed(len(data), read)

    async def _streamed(
        self,
        http: Request,
        session: Session,
        answering: "asyncio.Future[list[Generation]]",
        dialect: Dialect[R],
        replies: Callable[[Sequence[Generation]], list[Reply[R]]],
    ) -> AsyncIterator[bytes]:
        """Streams the events of answers, with comments until they are ready; a late error becomes an event."""
        while not answering.done():
            yield b": keep-alive\n\n"
            await asyncio.wait({answering}, timeout=self.keep_alive_s)
        try:
            generations = answering.result()
        except ShoalError as error:
            yield late_event(dialect, http.url.path, error)
            return
        if _has_left(http):
            return
        for event in dialect.events(replies(generations)):
            yield event_bytes(event, named=dialect.named)
        if not dialect.named:
            yield b"data: [DONE]\n\n"
        _deliver(session, generations)

    async def _count_tokens(self, http: Request) -> Response:
        self._session(http)
        data, context = await body(http, self.max_body_bytes), self.sessions.context
        spoken = await context.computed(len(data), lambda: conversation_of(MESSAGES.request(data, is_plain=False)))
        return json({"input_tokens": len(await context.rendered(spoken))})

    def _listed(self) -> Body:
        """The model, with the fields of OpenAI's and Anthropic's lists."""
        longest, created_s = self.sessions.context.max_model_len, int(self._started_s)
        created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
        of_openai: Body = {"object": "model", "created": created_s, "owned_by": "shoal", "max_model_len": longest}
        of_anthropic: Body = {"type": "model", "display_name": self.model, "created_at": created_at}
        return {"id": self.model, **of_openai, **of_anthropic, "max_input_tokens": longest, "max_tokens": longest}

    async def _models(self, http: Request) -> Response:
        self._session(http)
        pages: Body = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return json({"object": "list", "data": [self._listed()], **pages})

    async def _model(self, name: str, http: Request) -> Response:
        self._session(http)
        self._check_name(name)
        return json(self._listed())

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
        return self._check_name(decoded(data, _Named).model or self.model)

    def _check_name(self, asked: str) -> str:
        """The name, if the model has it. Raises `ModelNotFound`."""
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
        return json(error_body(error, status, str(http.scope["path"])), status)


def _shown(path: str) -> str:
    """Path for the log: a session's key is in its path."""
    if not path.startswith(SESSION):
        return path
    key, slash, rest = path.removeprefix(SESSION).partition("/")
    return f"{SESSION}{key[:8]}...{slash}{rest}"


def _deliver(session: Session, generations: Sequence[Generation]) -> None:
    for generation in generations:
        session.tree.deliver(generation.id)


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
