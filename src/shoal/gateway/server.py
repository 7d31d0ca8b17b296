"""Gateway routes for OpenAI and Anthropic, under `/v1` (the session is the API key) and `/s/<token>/v1`."""

import asyncio
import contextlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from shoal.errors import SessionError, ShoalError
from shoal.gateway import anthropic, chat, generate_route, responses
from shoal.gateway.http_responses import RenderedReply, error_body, has_left, streamed
from shoal.gateway.registry import SessionBounds, Sessions
from shoal.gateway.routes import Routes, Table
from shoal.gateway.session_routes import OpenRequest, OpenResponse, Unauthorized
from shoal.gateway.sessions import AnswerRequest, Session, SessionContext, SessionCounts, SessionOver, SessionRenderer
from shoal.gateway.token_tree import Generation
from shoal.interfaces import Engine
from shoal.net.server import body, decoded, guarded
from shoal.types import Message

MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 10.0
EVICTION_PERIOD_S = 5.0
UNKNOWN = "session: expected the URL or API key of an open session; POST /v1/sessions opens one"

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


class Gateway:
    """Gateway over sessions; `app` is the ASGI application, `sessions` the registry.

    With `is_open`, each request without a session gets a session of its own; otherwise such requests get 401.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: SessionRenderer,
        *,
        max_model_len: int,
        model: str = "shoal",
        is_open: bool = False,
        admin_key: str = "",
        bounds: SessionBounds | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        keep_alive_s: float = KEEP_ALIVE_S,
        host: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_model_len` is the most tokens, prompt and answer together, that the engine takes.

        With an `admin_key`, only requests that send it may open sessions, read metrics, or ask without a session.
        `host` is the address on which the user has the gateway listen.
        """
        pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="render")
        context = SessionContext(engine, renderer, max_model_len, pool, SessionCounts(), clock, set())
        self.sessions = Sessions(context, bounds)
        self._admin_key = admin_key
        self._model = model
        self._is_open = is_open
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        routes = Routes(*self._tables(), refused=self._refusal, lifetime=lambda _: self.lifetime())
        self.app = guarded(routes, host=host)

    def _tables(self) -> tuple[Table, Table]:
        """Routes served everywhere, and routes under the URLs of sessions."""
        of_models: Table = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._text),
            "/v1/responses": ("POST", self._responses),
            "/v1/messages": ("POST", self._messages),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/models": ("GET", self._models),
            "/inference/v1/generate": ("POST", self._tokens),
        }
        common: Table = {
            **of_models,
            "/v1/sessions": ("POST", self._open),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }
        return common, {**of_models, "/end": ("POST", self._end)}

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

    async def _open(self, http: Request) -> Response:
        self._admit(http)
        body, _ = await self._body(http, OpenRequest)
        session = self.sessions.open(sampling=body.sampling, limits=body.limits, policy=body.history_policy)
        url = f"{http.base_url}s/{session.token}"
        return _json(OpenResponse(session.token[:8], session.token, f"{url}/v1", url))

    async def _end(self, http: Request) -> Response:
        return _json(await self.sessions.end_and_export(self._session(http)))

    async def _chat(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, chat.ChatRequest)
        ask = chat.chat_ask(request, digest, is_retry=_is_retry(http), takes_tools=self._takes_tools)
        created = int(time.time())

        def whole(generation: Generation) -> chat.Body:
            return chat.chat_body(generation, session.tree.prompt_ids(generation), request, created)

        def chunks(generation: Generation) -> Iterable[chat.Body]:
            return chat.chat_chunks(whole(generation), with_usage=chat.wants_usage(request))

        return await self._answer(http, session, ask, RenderedReply(whole, chunks if request.stream else None))

    async def _text(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, chat.TextRequest)
        ask = chat.text_ask(request, digest, await self._prompt_ids(request), is_retry=_is_retry(http))
        created = int(time.time())

        def whole(generation: Generation) -> chat.Body:
            return chat.text_body(generation, session.tree.prompt_ids(generation), request, created)

        def chunks(generation: Generation) -> Iterable[chat.Body]:
            return chat.text_chunks(whole(generation), with_usage=chat.wants_usage(request))

        return await self._answer(http, session, ask, RenderedReply(whole, chunks if request.stream else None))

    async def _tokens(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, generate_route.TokensRequest)
        ask = generate_route.tokens_ask(request, digest, is_retry=_is_retry(http))

        def whole(generation: Generation) -> chat.Body:
            return generate_route.tokens_body(generation, session.tree.prompt_ids(generation), request)

        return await self._answer(http, session, ask, RenderedReply(whole, None))

    async def _responses(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, responses.ResponsesRequest)
        before: tuple[Message, ...] = ()
        if request.previous_response_id is not None:
            named = responses.generation_id(request.previous_response_id)
            try:
                before = session.tree.conversation(named)
            except KeyError:
                raise chat.Refusal("previous_response_id", "a response of this session", named) from None
        is_retry, created = _is_retry(http), int(time.time())
        ask = responses.responses_ask(request, before, digest, is_retry=is_retry, takes_tools=self._takes_tools)

        def whole(generation: Generation) -> chat.Body:
            prompt_ids = session.tree.prompt_ids(generation)
            return responses.responses_body(generation, prompt_ids, request, created)

        def events(generation: Generation) -> Iterable[chat.Body]:
            return responses.response_events(whole(generation))

        return await self._answer(
            http, session, ask, RenderedReply(whole, events if request.stream else None, named=True)
        )

    async def _messages(self, http: Request) -> Response:
        session = self._session(http)
        request, digest = await self._body(http, anthropic.MessagesRequest)
        if request.max_tokens is None:
            raise chat.Refusal("max_tokens", "a number", None)
        ask = anthropic.messages_ask(request, digest, is_retry=_is_retry(http), takes_tools=self._takes_tools)

        def whole(generation: Generation) -> chat.Body:
            return anthropic.messages_body(generation, session.tree.prompt_ids(generation), request.model)

        def events(generation: Generation) -> Iterable[chat.Body]:
            return anthropic.message_events(whole(generation))

        return await self._answer(
            http, session, ask, RenderedReply(whole, events if request.stream else None, named=True)
        )

    async def _count_tokens(self, http: Request) -> Response:
        self._session(http)
        request, digest = await self._body(http, anthropic.MessagesRequest)
        asked = anthropic.messages_ask(request, digest, is_retry=False, takes_tools=self._takes_tools)
        context, conversation = self.sessions.context, asked.conversation
        rendered = await context.in_thread(context.renderer.prompt_ids, conversation.messages, conversation.tools, "")
        return _json({"input_tokens": len(rendered)})

    async def _answer(self, http: Request, session: Session, ask: AnswerRequest, reply: RenderedReply) -> Response:
        """Answers with one body, or with the events of a stream, which begin when the whole answer is sampled."""
        if reply.events is None:
            generation = await session.generation(ask)
            answer = _json(reply.body(generation))
            if not has_left(http):
                session.deliver(generation)
            return answer
        task = asyncio.ensure_future(session.generation(ask))
        task.add_done_callback(_retrieve_error)  # the client may be gone when it fails
        await asyncio.wait({task}, timeout=self._keep_alive_s)
        if task.done():
            task.result()  # early failures have a status of their own
        stream = streamed(http, session, task, reply, self._keep_alive_s)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _models(self, http: Request) -> Response:
        self._session(http)
        longest = self.sessions.context.max_model_len
        one = {"id": self._model, "object": "model", "created": 0, "owned_by": "shoal", "max_model_len": longest}
        return _json({"object": "list", "data": [one]})

    async def _health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, http: Request) -> Response:
        self._admit(http)
        return Response(_exposition(self.sessions), media_type="text/plain; version=0.0.4")

    async def _prompt_ids(self, request: chat.TextRequest) -> tuple[int, ...]:
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            try:
                return tuple(await self.sessions.context.in_thread(self.sessions.context.renderer.token_ids, prompt))
            except UnicodeEncodeError:
                raise chat.Refusal("prompt", "Unicode text", "lone surrogates") from None
        ids = tuple(token for token in prompt if isinstance(token, int) and token >= 0)
        if len(ids) != len(prompt):
            raise chat.Refusal("prompt", "one text, or a list of token ids", f"{len(prompt)} entries")
        return ids

    @property
    def _takes_tools(self) -> bool:
        return self.sessions.context.renderer.takes_tools

    def _session(self, http: Request) -> Session:
        """Session that the URL or the API key names. Raises `Unauthorized` and `SessionOver`."""
        named = http.path_params.get("token")
        token = named or _api_key(http)
        session = self.sessions.get(token)
        if session is not None:
            return session
        if token in self.sessions.closed:
            raise SessionOver(self.sessions.closed[token])
        if named is None and self._is_open:
            self._admit(http)
            return self.sessions.passing()
        raise Unauthorized(UNKNOWN)

    def _admit(self, http: Request) -> None:
        """Raises `Unauthorized` for a request without the admin key, where one is set."""
        if self._admin_key and not hmac.compare_digest(_api_key(http).encode(), self._admin_key.encode()):
            raise Unauthorized("api_key: expected the gateway's admin key as Authorization: Bearer KEY")

    async def _body(self, http: Request, kind: type[T]) -> tuple[T, str]:
        """Body as `kind`, and its digest. Raises `SessionError` naming the field."""
        data = await body(http, self._max_body_bytes)
        value = decoded(data, kind)
        path = str(http.scope["path"]).encode()
        return value, blake2b(path + b"\0" + data, digest_size=16).hexdigest()

    def _refusal(self, http: Request, error: Exception) -> Response:
        """Response to an error."""
        counted, path = self.sessions.context.counts.counted, str(http.scope["path"])
        if isinstance(error, ClientDisconnect):  # before its request was complete: no one reads the answer
            counted["half_requests"] += 1
            return Response(status_code=400)
        if isinstance(error, HTTPException):
            return _json(error_body(SessionError(error.detail), error.status_code, path), error.status_code)
        assert isinstance(error, ShoalError)
        status = error.http_status
        counted[f"refused_{status}"] += 1
        return _json(error_body(error, status, path), status)


def _retrieve_error(task: "asyncio.Future[Generation]") -> None:
    if not task.cancelled():
        task.exception()


def _is_retry(http: Request) -> bool:
    """Whether a client library marks the request as a retry."""
    count = http.headers.get("x-stainless-retry-count", "0")
    return count.isdigit() and count != "0"


def _api_key(http: Request) -> str:
    """API key in the header of OpenAI's or Anthropic's clients."""
    return http.headers.get("x-api-key") or http.headers.get("authorization", "")[len("bearer ") :]


def _exposition(sessions: Sessions) -> str:
    """Metrics of all sessions in Prometheus' text format."""
    counts = sessions.context.counts
    lines = ["# TYPE shoal_gateway_open_sessions gauge", f"shoal_gateway_open_sessions {len(sessions)}"]
    for name, value in sorted(counts.counted.items()):
        lines += [f"# TYPE shoal_gateway_{name}_total counter", f"shoal_gateway_{name}_total {value}"]
    latencies = sorted(counts.latencies_s)
    for share in (0.5, 0.99):
        if latencies:
            at = latencies[int(share * (len(latencies) - 1))]
            lines.append(f'shoal_gateway_latency_seconds{{quantile="{share}"}} {at:.6f}')
    return "\n".join(lines) + "\n"


def _json(value: object, status: int = 200) -> Response:
    return Response(_encoder.encode(value), status_code=status, media_type="application/json")
