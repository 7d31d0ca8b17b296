"""The local engine behind HTTP, in the shape of vLLM's routes.

HTTP lives on the event loop, the model in a thread of its own; between them go requests one way and finished requests,
a step's worth at a time, the other way. A client that goes away takes its request with it. Listens on loopback unless
told otherwise: whoever reaches the port can load weights from any path that this process can read.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from shoal.engine import protocol
from shoal.engine.exposition import exposition
from shoal.engine.local import LocalEngine, PauseMode
from shoal.engine.request import Draft, Request
from shoal.engine.thread import EngineThread
from shoal.errors import EngineError, EngineUnavailable, RequestRefused
from shoal.types import Sampling

MAX_BODY_BYTES = 8 * 1024 * 1024
CLIENT_GONE = 499  # nobody reads it

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


class TooLarge(RequestRefused):
    """A body over the limit (HTTP 413)."""


class EngineServer:
    """The routes of one engine. `app` is the ASGI application.

    `ready` is called when requests can be answered, `crashed` when the engine cannot go on.
    """

    def __init__(
        self,
        engine: LocalEngine,
        *,
        ready: Callable[[], None],
        crashed: Callable[[BaseException], None],
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes
        self._ready = ready
        self._crashed = crashed
        self._waiters: dict[Request, asyncio.Future[None]] = {}
        self._refused = 0
        routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/score", self._score, methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused),
            Route("/abort_requests", self._abort_requests, methods=["POST"]),
            Route("/update_weights", self._update_weights, methods=["POST"]),
            Route("/weight_info", self._weight_info),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/info", self._info),
        ]
        self.app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={EngineError: self._engine_error, HTTPException: self._http_error},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(
            self._engine,
            deliver=lambda finished: _soon(loop, self._settle, finished),
            crashed=lambda error: _soon(loop, self._crashed, error),
        )
        self._thread.start()
        self._ready()
        yield
        self._thread.stop()

    def _settle(self, finished: list[Request]) -> None:
        for request in finished:
            waiter = self._waiters.pop(request, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` between two steps of the engine."""
        return await asyncio.wrap_future(self._thread.call(function))

    async def _generate(self, http: HttpRequest) -> Response:
        body = await self._body(http, protocol.GenerateRequest)
        request = _request(body)
        if refusal := self._engine.refusal(request):
            raise refusal
        ended = self._waiters[request] = asyncio.get_running_loop().create_future()
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await self._call(lambda: self._engine.submit(request))
            await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not ended.done():
                self._waiters.pop(request, None)
                self._thread.call(lambda: self._engine.abort([request]))
        if not ended.done():
            return Response(status_code=CLIENT_GONE)
        return _json(_response(body, request))

    async def _score(self, http: HttpRequest) -> Response:
        token_ids = (await self._body(http, protocol.ScoreRequest)).token_ids
        if refusal := self._engine.score_refusal(token_ids):
            raise refusal
        return _json(protocol.ScoreResponse(await self._call(lambda: self._engine.score(token_ids))))

    async def _pause(self, http: HttpRequest) -> Response:
        name = http.query_params.get("mode", PauseMode.ABORT)
        if name not in list(PauseMode):
            raise RequestRefused(f"mode: expected one of {', '.join(PauseMode)}, got {name!r}")
        await asyncio.wrap_future(await self._call(lambda: self._engine.pause(PauseMode(name))))
        return _json(protocol.PausedState(self._engine.paused))

    async def _resume(self, _: HttpRequest) -> Response:
        await self._call(self._engine.resume)
        return _json(protocol.PausedState(self._engine.paused))

    async def _is_paused(self, _: HttpRequest) -> Response:
        return _json(protocol.PausedState(self._engine.paused))

    async def _abort_requests(self, http: HttpRequest) -> Response:
        names = (await self._body(http, protocol.AbortRequest)).request_ids

        def abort() -> int:
            return self._engine.abort(self._engine.named(names) if names else None)

        return _json({"aborted": await self._call(abort)})

    async def _update_weights(self, http: HttpRequest) -> Response:
        body = await self._body(http, protocol.UpdateWeightsRequest)
        # Read and checked in a thread of its own: generation goes on meanwhile, and stops for the copy only.
        weights = await asyncio.to_thread(self._engine.slots.staged, body.version, Path(body.path), body.checksum)
        served: Future[int] = await self._call(lambda: self._engine.update(weights))
        await asyncio.wrap_future(served)
        return await self._weight_info(http)

    async def _weight_info(self, _: HttpRequest) -> Response:
        return _json(await self._call(lambda: protocol.WeightInfo(self._engine.version, self._engine.checksum)))

    async def _health(self, _: HttpRequest) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, _: HttpRequest) -> Response:
        text = exposition(await self._call(self._engine.counts), refused=self._refused)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _info(self, _: HttpRequest) -> Response:
        return _json(await self._call(self._engine.info))

    async def _body(self, http: HttpRequest, kind: type[T]) -> T:
        """The body as `kind`. Raises `RequestRefused` naming the field."""
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > self._max_body_bytes:
                raise TooLarge(f"body: expected at most {self._max_body_bytes} bytes")
        try:
            return msgspec.json.decode(data or b"{}", type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestRefused(f"body: {error}") from error

    async def _engine_error(self, _: HttpRequest, error: Exception) -> Response:
        self._refused += 1
        status = 413 if isinstance(error, TooLarge) else 503 if isinstance(error, EngineUnavailable) else 400
        return _error(str(error), status)

    async def _http_error(self, _: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(error.detail, error.status_code)


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """Calls `function` on the loop; a loop that has closed needs nothing any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)


async def _disconnected(http: HttpRequest) -> None:
    """Returns when the client has gone. The body must have been read."""
    receive: Callable[[], Awaitable[object]] = http.receive
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return


def _request(body: protocol.GenerateRequest) -> Request:
    """What the engine is asked. Raises `RequestRefused` for values out of range."""
    params = body.sampling_params
    try:
        sampling = Sampling(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0) if params.top_k >= -1 else params.top_k,
            min_p=params.min_p,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            seed=params.seed,
        )
    except ValueError as error:
        raise RequestRefused(f"sampling_params.{error}") from error
    return Request(body.token_ids, sampling, n=params.n, priority=body.priority, name=body.request_id)


def _response(body: protocol.GenerateRequest, request: Request) -> protocol.GenerateResponse:
    flat = body.logprobs_format == "flat"
    drawn = sum(len(draft.drawn) for draft in request.drafts)
    prompt = len(request.prompt_ids)
    return protocol.GenerateResponse(
        request_id=body.request_id,
        choices=[_choice(draft, flat) for draft in request.drafts],
        usage=protocol.Usage(prompt, drawn, prompt + drawn),
        prompt_token_ids=None if flat else body.token_ids,
    )


def _choice(draft: Draft, flat: bool) -> protocol.Choice:
    assert draft.finish_reason is not None
    starts = [0, *(end for _, end in draft.spans)]
    content = None
    if not flat:
        pairs = zip(draft.drawn, draft.logprobs, strict=True)
        content = protocol.Logprobs([protocol.TokenLogprob(f"token_id:{token}", token, lp) for token, lp in pairs])
    return protocol.Choice(
        index=draft.index,
        token_ids=draft.drawn,
        finish_reason=draft.finish_reason,
        weight_versions=[
            protocol.VersionSpan(version, start, end)
            for start, (version, end) in zip(starts, draft.spans, strict=False)
        ],
        logprobs=content,
        token_logprobs=draft.logprobs if flat else None,
    )


def _json(value: object) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")


def _error(message: str, status: int) -> Response:
    body = protocol.ErrorResponse(protocol.ErrorDetail(message, status))
    return Response(_encoder.encode(body), status_code=status, media_type="application/json")
