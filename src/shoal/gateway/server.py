"""Gateway routes for OpenAI and Anthropic, under `/v1` (the session is the API key) and `/s/<token>/v1`."""

import asyncio
import contextlib
import hmac
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from shoal.errors import SessionError, ShoalError
from shoal.gateway.answer_request import Answering, AnswerRequest, SessionContext, UntrainedSampler
from shoal.gateway.anthropic import MESSAGES, conversation_of
from shoal.gateway.api_errors import ModelNotFound, error_body, late_event
from shoal.gateway.completions import CHAT, TEXT, TOKENS
from shoal.gateway.dialects import Body, Dialect, R, Reply
from shoal.gateway.request_log import (
    FREE_PATHS,
    SESSION,
    OnRequest,
    RequestRecord,
    api_key,
    has_left,
    is_retry,
    shown_path,
)
from shoal.gateway.responses import RESPONSES
from shoal.gateway.sessions import ONE_REQUEST, OpenRequest, Session, SessionBounds, SessionOver, Sessions, export
from shoal.interfaces import Engine, ModelServer
from shoal.net.server import body, decoded, disconnected, exposition, guarded, json, look

if TYPE_CHECKING:
    from shoal.gateway.promotion import Trial
    from shoal.model.chat_template import ChatRenderer

MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 10.0
EVICTION_PERIOD_S = 5.0
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
    """Aliases of the model in untrained sessions."""
    model_server: ModelServer | None = None
    """Answers requests without a session, each in an untrained session; with None they get status 401."""
    trial: "Trial | None" = None
    """Promotion of a new Version, which answers a share of the sessions."""
    on_request: OnRequest = lambda record: None
    """Gets each request once it is answered."""
    admin_key: str = ""
    """Key required to open sessions, read metrics, or ask without a session; empty requires none."""
    bounds: SessionBounds = field(default_factory=SessionBounds)
    max_body_bytes: int = MAX_BODY_BYTES
    keep_alive_s: float = KEEP_ALIVE_S
    host: str = ""
    """Address that the gateway listens on, as the user set it."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="render")
        context = SessionContext(self.renderer, self.max_model_len, pool, self.clock)
        self.sessions = Sessions(context, self.engine, self.bounds, self.trial)
        self._started_s = time.time()
        of_pages: dict[str, tuple[str, Endpoint]] = {}
        if self.model_server is not None:
            from shoal.gateway import home_page  # training runs do not need it

            chats, longest = self.renderer.has_template, self.max_model_len
            page = partial(home_page.home_page, model=self.model, longest=longest, chats=chats)
            home = ("GET", partial(self._admitted, page))
            of_pages = {"": home, "/look.css": ("GET", look), "/talk.js": ("GET", home_page.script)}
        if self.trial is not None:
            of_pages["/v1/outcomes"] = ("POST", partial(self._admitted, self.trial.take))
            of_pages["/v1/promotion"] = ("GET", partial(self._admitted, self.trial.show))
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
        """Lifespan of `app`: evicts idle sessions, and cancels all work under way at the end."""
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
        http, record = (
            Request(scope, receive, send),
            RequestRecord(str(scope["method"]), shown_path(str(scope["path"]))),
        )
        scope["shoal.record"], began_s = record, self.clock()
        try:
            response = await self._endpoint(scope)(http)
        except (ShoalError, HTTPException, ClientDisconnect, RecursionError) as error:
            if isinstance(error, RecursionError):  # of any reader of JSON
                error = SessionError("body: expected JSON that is less deep")
            response = self._refusal(http, error)
            record.error = str(error) or type(error).__name__
        try:
            await response(scope, receive, send)
            record.status = response.status_code
        finally:
            record.duration_s = self.clock() - began_s
            if record.path not in FREE_PATHS:
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
        return json({"session_id": session.tree.name, "api_key": session.token, **urls})

    async def _end(self, http: Request) -> Response:
        session = self._session(http)
        await self.sessions.end(session)
        return json(export(session.tree))

    async def _generate(self, dialect: Dialect[R], http: Request) -> Response:
        """Answers with one body, or with the events of a stream."""
        session, record = self._session(http), http.scope["shoal.record"]
        data = await body(http, self.max_body_bytes)
        request, asks = await self._read(dialect, http, data, session)
        news, created = asyncio.Queue[Answering](), int(time.time())
        answers = await session.answers(asks, news)
        model = request.model or self.model
        replies = [Reply(request, one, session, model, created, index) for index, one in enumerate(answers)]
        record.id, record.prompt_tokens = replies[0].id, sum(len(one.prompt_ids) for one in answers[:: request.choices])
        if request.stream:
            events = self._events(http, dialect, replies, news)
            first = await anext(events, b"")  # an error before the first event sets the HTTP status
            return StreamingResponse(_after(first, events), media_type="text/event-stream")
        try:
            await _whole(http, session, answers)
            answer = json(dialect.body(replies))
            if not has_left(http):
                _deliver(replies)
            return answer
        finally:
            await session.leave(answers)
            _note(record, replies)

    async def _read(
        self, dialect: Dialect[R], http: Request, data: bytes, session: Session
    ) -> tuple[R, Sequence[AnswerRequest]]:
        """Parses a body into its request and prompts; long bodies are parsed in a thread. Raises `SessionError`."""

        def read() -> tuple[R, Sequence[AnswerRequest]]:
            request, digest = dialect.request(data, is_trained=session.is_trained), ""
            if not session.is_trained:
                http.scope["shoal.record"].model = self._check_name(request.model or self.model)
            else:
                digest = blake2b(f"{http.scope['path']}\0".encode() + data, digest_size=16).hexdigest()
            given: dict[str, Any] = {"choices": request.choices, "streams": bool(request.stream)}
            given |= {"digest": digest, "is_retry": is_retry(http)}
            return request, [replace(dialect.ask(one, session.tree), **given) for one in dialect.each(request)]

        return await self.sessions.context.computed(len(data), read)

    async def _events(
        self, http: Request, dialect: Dialect[R], replies: Sequence[Reply[R]], news: "asyncio.Queue[Answering]"
    ) -> AsyncGenerator[bytes, None]:
        """Events of a stream, with keep-alive comments; an error after the first byte becomes an event."""
        form, record, began_s = dialect.stream(replies), http.scope["shoal.record"], self.clock()
        running, has_begun, is_open = {reply.answering: reply for reply in replies}, False, False
        try:
            while running:
                try:
                    async with asyncio.timeout(self.keep_alive_s):
                        reply = running.get(await news.get())
                    if reply is not None and reply.answering.ended.done():
                        running.pop(reply.answering).answering.ended.result()
                except TimeoutError:
                    has_begun = True
                    yield b": keep-alive\n\n"
                    continue
                except ShoalError as error:
                    if not has_begun:
                        raise
                    yield late_event(dialect, http.url.path, error)
                    return
                if reply is None or (not is_open and has_left(http)):
                    continue
                if not is_open:
                    has_begun, is_open, record.first_token_s = True, True, self.clock() - began_s
                    for event in form.opening():
                        yield event
                for event in form.news(reply.index):
                    yield event
            for event in form.end() if is_open else ():
                yield event
            if is_open:
                _deliver(replies)
        finally:
            await replies[0].session.leave([reply.answering for reply in replies])
            _note(record, replies)

    async def _count_tokens(self, http: Request) -> Response:
        self._session(http)
        data, context = await body(http, self.max_body_bytes), self.sessions.context
        spoken = await context.computed(len(data), lambda: conversation_of(MESSAGES.request(data, is_trained=True)))
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
        token = named or api_key(http)
        session = self.sessions.get(token)
        if session is not None:
            return session
        if token in self.sessions.closed:
            raise SessionOver(self.sessions.closed[token])
        if named is None and self.model_server is not None:
            self._admit(http)
            context = self.sessions.context
            sampler = UntrainedSampler(context, self.model_server)
            return Session(context, ONE_REQUEST, self.trial.sampler(sampler) if self.trial else sampler)
        raise Unauthorized(UNKNOWN)

    def _check_name(self, asked: str) -> str:
        """Checks that a name is one of the model's. Raises `ModelNotFound`."""
        if asked != self.model and asked not in self.also_called:
            raise ModelNotFound(f"model: expected {self.model!r}, got {asked!r}; GET /v1/models lists what is served")
        return asked

    def _admit(self, http: Request) -> None:
        """Raises `Unauthorized` for a request without the admin key, where one is set."""
        if self.admin_key and not hmac.compare_digest(api_key(http).encode(), self.admin_key.encode()):
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


async def _whole(http: Request, session: Session, answers: Sequence[Answering]) -> None:
    """Waits for the end of all answers. Raises a `ShoalError`.

    Raises `ClientDisconnect` when the client of an untrained session disconnects.
    """
    whole = asyncio.gather(*(asyncio.shield(one.ended) for one in answers))
    if session.is_trained:
        await whole
        return
    left = asyncio.create_task(disconnected(http), name="client of an answer")
    try:
        await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise ClientDisconnect
        whole.result()
    finally:
        for waiting in (whole, left):
            waiting.cancel()
        await asyncio.gather(whole, left, return_exceptions=True)


def _note(record: RequestRecord, replies: Sequence[Reply[R]]) -> None:
    """Records token counts and finish reasons."""
    record.completion_tokens = sum(len(reply.token_ids) for reply in replies)
    record.finish = ",".join(sorted({reply.finish_reason or "unfinished" for reply in replies}))


def _deliver(replies: Sequence[Reply[R]]) -> None:
    for reply in replies:
        reply.session.tree.deliver(reply.answering.id)


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
