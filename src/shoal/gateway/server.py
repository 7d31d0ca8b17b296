"""The gateway's routes: OpenAI's and Anthropic's, under `/v1` (the session is the API key) and `/s/<token>/v1`."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from shoal.errors import EngineUnavailable, HistoryDiverged, RequestRefused, SessionError, ShoalError
from shoal.gateway import anthropic, chat, tokens
from shoal.gateway.control import OpenRequest, OpenResponse, Unauthorized, export
from shoal.gateway.sessions import Ask, ContextOverflow, Counts, Desk, Renderer, Session, SessionOver, Sessions
from shoal.interfaces import Engine
from shoal.session import Generation
from shoal.types import Json

MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 10.0

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


class TooLarge(SessionError):
    """A body over the limit (HTTP 413)."""


STATUS: tuple[tuple[type[ShoalError], int], ...] = (
    (Unauthorized, 401),
    (HistoryDiverged, 409),
    (SessionOver, 410),
    (TooLarge, 413),
    (EngineUnavailable, 503),
    (SessionError, 400),
    (RequestRefused, 400),
)


class Gateway:
    """`app` is the ASGI application, `sessions` what is open.

    With `is_open`, requests without a session are answered too, each by a session of its own; else they get 401.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        max_model_len: int,
        model: str = "shoal",
        is_open: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        keep_alive_s: float = KEEP_ALIVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_model_len` is the most tokens, prompt and answer together, that the engine takes."""
        pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="render")
        self.sessions = Sessions(Desk(engine, renderer, max_model_len, pool, Counts(), clock, set()))
        self._model = model
        self._is_open = is_open
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        model_routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._text, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/inference/v1/generate", self._tokens, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=[
                *model_routes,
                Route("/v1/sessions", self._open, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Mount("/s/{token}", routes=[*model_routes, Route("/end", self._end, methods=["POST"])]),
            ],
            lifespan=self._lifespan,
            exception_handlers={ShoalError: self._refused, HTTPException: self._http_error},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        under_way = list(self.sessions.desk.tasks)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self.sessions.desk.pool.shutdown(wait=True)

    async def _open(self, http: Request) -> Response:
        body, _ = await self._body(http, OpenRequest)
        session = self.sessions.open(sampling=body.sampling, limits=body.limits, policy=body.history_policy)
        url = f"{http.base_url}s/{session.token}"
        return _json(OpenResponse(session.token[:8], session.token, f"{url}/v1", url))

    async def _end(self, http: Request) -> Response:
        session = self._session(http)
        await self.sessions.end(session)
        return _json(export(session))

    async def _chat(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, chat.ChatRequest)
        takes_tools = self.sessions.desk.renderer.takes_tools
        ask = chat.chat_ask(request, digest, is_retry=_is_retry(http), takes_tools=takes_tools)
        created = int(time.time())

        def body(generation: Generation) -> chat.Body:
            return chat.chat_body(generation, session.ledger.prompt_ids(generation), request, created)

        def events(generation: Generation) -> Iterable[bytes]:
            chunks = chat.chat_chunks(body(generation), with_usage=_wants_usage(request))
            return [*map(_event, chunks), b"data: [DONE]\n\n"]

        return await self._answered(http, session, ask, body, events if request.stream else None)

    async def _text(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, chat.TextRequest)
        ask = chat.text_ask(request, digest, await self._prompt_ids(request), is_retry=_is_retry(http))
        created = int(time.time())

        def body(generation: Generation) -> chat.Body:
            return chat.text_body(generation, session.ledger.prompt_ids(generation), request, created)

        def events(generation: Generation) -> Iterable[bytes]:
            chunks = chat.text_chunks(body(generation), with_usage=_wants_usage(request))
            return [*map(_event, chunks), b"data: [DONE]\n\n"]

        return await self._answered(http, session, ask, body, events if request.stream else None)

    async def _tokens(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, tokens.TokensRequest)
        ask = tokens.tokens_ask(request, digest, is_retry=_is_retry(http))

        def body(generation: Generation) -> chat.Body:
            return tokens.tokens_body(generation, session.ledger.prompt_ids(generation), request)

        return await self._answered(http, session, ask, body, None)

    async def _messages(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, anthropic.MessagesRequest)
        if request.max_tokens is None:
            raise chat.Refusal("max_tokens", "a number", None)
        takes_tools = self.sessions.desk.renderer.takes_tools
        ask = anthropic.messages_ask(request, digest, is_retry=_is_retry(http), takes_tools=takes_tools)

        def body(generation: Generation) -> chat.Body:
            return anthropic.messages_body(generation, session.ledger.prompt_ids(generation), request.model)

        def events(generation: Generation) -> Iterable[bytes]:
            return [
                b"event: %s\n" % str(e["type"]).encode() + _event(e) for e in anthropic.message_events(body(generation))
            ]

        return await self._answered(http, session, ask, body, events if request.stream else None)

    async def _count_tokens(self, http: Request) -> Response:
        self._session(http)
        request, digest = await self._body(http, anthropic.MessagesRequest)
        desk = self.sessions.desk
        asked = anthropic.messages_ask(request, digest, is_retry=False, takes_tools=desk.renderer.takes_tools)
        rendered = await desk.in_thread(
            desk.renderer.prompt_ids, asked.conversation.messages, asked.conversation.tools, ""
        )
        return _json({"input_tokens": len(rendered)})

    async def _answered(
        self,
        http: Request,
        session: Session,
        ask: Ask,
        body: Callable[[Generation], chat.Body],
        events: Callable[[Generation], Iterable[bytes]] | None,
    ) -> Response:
        """The answer as one body, or as the events of a stream, which begin when all is drawn."""
        if events is None:
            generation = await session.generation(ask)
            answer = _json(body(generation))
            if not await http.is_disconnected():
                session.deliver(generation)
            return answer
        task = asyncio.ensure_future(session.generation(ask))
        task.add_done_callback(_noticed)  # the client may be gone when it fails
        await asyncio.wait({task}, timeout=self._keep_alive_s)
        if task.done():
            task.result()  # what fails early has a status of its own
        return StreamingResponse(self._stream(session, task, events), media_type="text/event-stream")

    async def _stream(
        self,
        session: Session,
        task: "asyncio.Future[Generation]",
        events: Callable[[Generation], Iterable[bytes]],
    ) -> AsyncIterator[bytes]:
        while not task.done():
            yield b": keep-alive\n\n"
            await asyncio.wait({task}, timeout=self._keep_alive_s)
        try:
            generation = task.result()
        except ShoalError as error:
            yield _event({"error": _openai_error(error, _status(error))})
            return
        for event in events(generation):
            yield event
        session.deliver(generation)

    async def _models(self, http: Request) -> Response:
        self._session(http)
        longest = self.sessions.desk.max_model_len
        one = {"id": self._model, "object": "model", "created": 0, "owned_by": "shoal", "max_model_len": longest}
        return _json({"object": "list", "data": [one]})

    async def _health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        return Response(_exposition(self.sessions), media_type="text/plain; version=0.0.4")

    async def _prompt_ids(self, request: chat.TextRequest) -> tuple[int, ...]:
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            try:
                return tuple(await self.sessions.desk.in_thread(self.sessions.desk.renderer.token_ids, prompt))
            except UnicodeEncodeError:
                raise chat.Refusal("prompt", "Unicode text", "lone surrogates") from None
        ids = tuple(token for token in prompt if isinstance(token, int) and token >= 0)
        if len(ids) != len(prompt):
            raise chat.Refusal("prompt", "one text, or a list of token ids", f"{len(prompt)} entries")
        return ids

    def _session(self, http: Request) -> Session:
        """The session that the URL or the API key names. Raises `Unauthorized`."""
        named = http.path_params.get("token")
        token = named or http.headers.get("x-api-key") or http.headers.get("authorization", "")[len("bearer ") :]
        session = self.sessions.get(token)
        if session is not None:
            return session
        if named is None and self._is_open:
            return self.sessions.passing()
        raise Unauthorized("session: expected the URL or API key of an open session; POST /v1/sessions opens one")

    async def _body(self, http: Request, kind: type[T]) -> tuple[T, str]:
        """The body as `kind`, and its digest. Raises `SessionError` naming the field."""
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > self._max_body_bytes:
                raise TooLarge(f"body: expected at most {self._max_body_bytes} bytes")
        try:
            value = msgspec.json.decode(data or b"{}", type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise SessionError(f"body: {error}") from error
        return value, blake2b(http.url.path.encode() + b"\0" + data, digest_size=16).hexdigest()

    async def _refused(self, http: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        status = _status(error)
        self.sessions.desk.counts.counted[f"refused_{status}"] += 1
        return _error(http, error, status)

    async def _http_error(self, http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(http, SessionError(error.detail), error.status_code)


def _noticed(task: "asyncio.Future[Generation]") -> None:
    if not task.cancelled():
        task.exception()


def _is_retry(http: Request) -> bool:
    """Whether a client library says that it sends this again."""
    count = http.headers.get("x-stainless-retry-count", "0")
    return count.isdigit() and count != "0"


def _wants_usage(request: chat.Drawing) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


def _status(error: ShoalError) -> int:
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def _openai_error(error: ShoalError, status: int) -> dict[str, Json]:
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = error.field if isinstance(error, chat.Refusal) else None
    return {"message": str(error), "type": kind, "param": param, "code": code}


def _error(http: Request, error: ShoalError, status: int) -> Response:
    """In the words of whoever asks."""
    if "/v1/messages" in http.url.path:
        kinds = {401: "authentication_error", 413: "request_too_large", 503: "overloaded_error"}
        kind = kinds.get(status, "invalid_request_error")
        return _json({"type": "error", "error": {"type": kind, "message": str(error)}}, status)
    return _json({"error": _openai_error(error, status)}, status)


def _exposition(sessions: Sessions) -> str:
    """What all sessions did, for Prometheus."""
    counts = sessions.desk.counts
    lines = ["# TYPE shoal_gateway_open_sessions gauge", f"shoal_gateway_open_sessions {len(sessions)}"]
    for name, value in sorted(counts.counted.items()):
        lines += [f"# TYPE shoal_gateway_{name}_total counter", f"shoal_gateway_{name}_total {value}"]
    latencies = sorted(counts.latencies_s)
    for share in (0.5, 0.99):
        if latencies:
            at = latencies[int(share * (len(latencies) - 1))]
            lines.append(f'shoal_gateway_latency_seconds{{quantile="{share}"}} {at:.6f}')
    return "\n".join(lines) + "\n"


def _event(body: chat.Body) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


def _json(value: object, status: int = 200) -> Response:
    return Response(_encoder.encode(value), status_code=status, media_type="application/json")
