"""The local engine behind HTTP, in the shape of vLLM's routes.

HTTP lives on the event loop, the model in a thread of its own; between them go requests one way and finished requests,
a step's worth at a time, the other way. A client that goes away takes its request with it. Listens on loopback unless
told otherwise: whoever reaches the port can load weights from any path that this process can read.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shoal.engine import completions, protocol
from shoal.engine.detokenizer import Tokenizer
from shoal.engine.options import PauseMode
from shoal.engine.prometheus import exposition
from shoal.engine.request import Draft, Request, scoring
from shoal.engine.response_bodies import choice_part, prompt_logprobs, response, usage
from shoal.engine.step_engine import LocalEngine
from shoal.engine.thread import EngineThread, result
from shoal.engine.token_stream import Part, parts
from shoal.errors import EngineError, EngineUnavailable, RequestRefused
from shoal.types import FinishReason, Sampling

MAX_BODY_BYTES = 8 * 1024 * 1024
CLIENT_GONE = 499  # nobody reads it
HUNG_S = 600.0  # a step of a large model on few cores takes a minute, and the first one on a GPU as long

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
        hung_s: float = HUNG_S,
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
    ) -> None:
        """`tokenizer` is called when text is to be read for the first time; a step of `hung_s` never ends."""
        self._engine = engine
        self._max_body_bytes = max_body_bytes
        self._hung_s = hung_s
        self._ready = ready
        self._crashed = crashed
        self._waiters: dict[Request, asyncio.Future[None]] = {}
        self._streams: dict[Request, asyncio.Event] = {}  # set after every step
        self._refused = self._failed_updates = 0
        self._failure = ""
        self._tokenizer = cache(tokenizer)
        routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
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
            exception_handlers={
                EngineError: self._engine_error,
                HTTPException: self._http_error,
                Exception: self._unexpected_error,
            },
        )

    def stop(self) -> None:
        """Ends all requests with what was drawn, so that they can go on elsewhere, and takes no new ones."""
        self._thread.call(lambda: self._engine.pause(PauseMode.ABORT))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(
            self._engine,
            deliver=lambda finished: _soon(loop, self._settle, finished) if finished or self._streams else None,
            crashed=lambda error: _soon(loop, self._crashed, error),
        )
        self._thread.start()
        self._ready()
        yield
        self._thread.stop()

    def _settle(self, finished: list[Request]) -> None:
        for stepped in self._streams.values():
            stepped.set()
        for request in finished:
            waiter = self._waiters.pop(request, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` between two steps of the engine."""
        return await result(self._thread.call(function))

    async def _generate(self, http: HttpRequest) -> Response:
        body = await self._body(http, protocol.GenerateRequest)
        request = _request(body)
        if refusal := self._engine.refusal(request):
            raise refusal
        if body.stream:
            return await self._events(http, [request], lambda found: self._generate_events(body, request, found))
        await self._answered(http, request)
        return _json(response(body, request)) if request.finished else Response(status_code=CLIENT_GONE)

    async def _answered(self, http: HttpRequest, request: Request) -> None:
        """Returns when a request has ended, or its client has gone."""
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

    async def _watched(self, http: HttpRequest, requests: Sequence[Request]) -> AsyncGenerator[list[Part], None]:
        """Submits requests when first asked, then gives what they draw; aborts them when left before they ended."""
        stepped = asyncio.Event()
        gone = asyncio.ensure_future(_disconnected(http))
        gone.add_done_callback(lambda _: stepped.set())
        try:
            for request in requests:
                self._streams[request] = stepped
                await self._call(partial(self._engine.submit, request))
            yield []
            async for found in parts(self._engine, requests, stepped, gone):
                yield found
        finally:
            gone.cancel()
            for request in requests:
                self._streams.pop(request, None)
            if any(not request.finished for request in requests):
                self._thread.call(lambda: self._engine.abort(requests))

    async def _events(
        self,
        http: HttpRequest,
        requests: Sequence[Request],
        bodies: Callable[[AsyncIterator[list[Part]]], AsyncIterator[msgspec.Struct]],
    ) -> Response:
        """A stream of server-sent events. Raises what submitting raises, so that it still has a status."""
        found = self._watched(http, requests)
        await anext(found)

        async def events() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(found):
                async for body in bodies(found):
                    yield b"data: " + _encoder.encode(body) + b"\n\n"
                yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _generate_events(
        self, body: protocol.GenerateRequest, request: Request, found: AsyncIterator[list[Part]]
    ) -> AsyncIterator[protocol.GenerateEvent]:
        flat = body.logprobs_format == "flat"
        async for new in found:
            yield protocol.GenerateEvent(body.request_id, [choice_part(part, flat=flat) for part in new])
        yield protocol.GenerateEvent(body.request_id, [], usage([request]), prompt_logprobs(request))

    async def _completions(self, http: HttpRequest) -> Response:
        body = await self._body(http, completions.CompletionRequest)
        tokenizer = self._tokenizer()
        requests = completions.requests_of(body, tokenizer, self._engine.limits.max_model_len)
        for request in requests:
            if refusal := self._engine.refusal(request):
                raise refusal
        assert tokenizer is not None, "without one the request is refused"
        name = f"cmpl-{secrets.token_hex(12)}"
        if body.stream:
            return await self._events(
                http, requests, lambda found: self._completion_events(body, name, requests, tokenizer, found)
            )
        found = self._watched(http, requests)
        async with contextlib.aclosing(found):
            await anext(found)
            whole = await self._whole_texts(completions.texts(requests, body, tokenizer), found)
        if whole is None:
            return Response(status_code=CLIENT_GONE)
        choices = completions.whole_choices(whole, body, requests, tokenizer)
        return _json(completions.answer(body, name, choices, requests))

    async def _completion_events(
        self,
        body: completions.CompletionRequest,
        name: str,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        found: AsyncIterator[list[Part]],
    ) -> AsyncIterator[completions.CompletionResponse]:
        texts = completions.texts(requests, body, tokenizer)
        async for new in found:
            if choices := self._grown(texts, new):
                yield completions.answer(body, name, choices, None)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield completions.answer(body, name, [], requests)

    async def _whole_texts(
        self, texts: dict[Draft, completions.Text], found: AsyncIterator[list[Part]]
    ) -> list[completions.TextChoice] | None:
        """Every completion, in order; None when the client has gone."""
        told: dict[int, completions.TextChoice] = {}
        async for new in found:
            told |= {choice.index: choice for choice in self._grown(texts, new)}
        return [told[index] for index in sorted(told)] if len(told) == len(texts) else None

    def _grown(self, texts: dict[Draft, completions.Text], new: Sequence[Part]) -> list[completions.TextChoice]:
        """What new parts add. A completion that has come to a stop text is ended in the engine as well."""
        choices = []
        for part in new:
            text = texts[part.draft]
            if not text.ended and (grown := text.grown(part)) is not None:
                choices.append(grown)
                if text.ended and part.reason is None:
                    self._thread.call(partial(self._engine.end, part.draft))
        return choices

    async def _score(self, http: HttpRequest) -> Response:
        token_ids = (await self._body(http, protocol.ScoreRequest)).token_ids
        if refusal := self._engine.score_refusal(token_ids):
            raise refusal
        if len(token_ids) == 1:
            return _json(protocol.ScoreResponse([]))
        request = scoring(token_ids)
        await self._answered(http, request)
        draft = request.drafts[0] if request.drafts else None
        if draft is None or not request.finished:
            return Response(status_code=CLIENT_GONE)
        if draft.finish_reason is FinishReason.ABORT:
            raise EngineUnavailable("scoring was aborted")
        return _json(protocol.ScoreResponse(draft.scores))

    async def _pause(self, http: HttpRequest) -> Response:
        name = http.query_params.get("mode", PauseMode.ABORT)
        if name not in list(PauseMode):
            raise RequestRefused(f"mode: expected one of {', '.join(PauseMode)}, got {name!r}")
        await result(await self._call(lambda: self._engine.pause(PauseMode(name))))
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
        try:
            if refusal := self._engine.update_refusal(body.version):
                raise refusal
            # Read and checked in a thread of its own: generation goes on meanwhile, and stops for the copy only.
            weights = await asyncio.to_thread(self._engine.slots.staged, body.version, Path(body.path), body.checksum)
        except RequestRefused as error:
            self._failed_updates += 1
            self._failure = f"version {body.version}: {error}"
            raise
        self._failure = ""
        served: Future[int] = await self._call(lambda: self._engine.update(weights))
        await result(served)
        return await self._weight_info(http)

    async def _weight_info(self, _: HttpRequest) -> Response:
        return _json(
            await self._call(lambda: protocol.WeightInfo(self._engine.version, self._engine.checksum, self._failure))
        )

    async def _health(self, _: HttpRequest) -> Response:
        if (turn_s := self._thread.turn_s) > self._hung_s:
            return _error(f"the engine hangs: it has been at one step for {turn_s:.0f} s", 503)
        return _json({"status": "ok"})

    async def _metrics(self, _: HttpRequest) -> Response:
        text = exposition(
            await self._call(self._engine.counts), refused=self._refused, failed_updates=self._failed_updates
        )
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
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRefused(f"body: {error}") from error

    async def _engine_error(self, _: HttpRequest, error: Exception) -> Response:
        self._refused += 1
        status = 413 if isinstance(error, TooLarge) else 503 if isinstance(error, EngineUnavailable) else 400
        return _error(str(error), status)

    async def _http_error(self, _: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(error.detail, error.status_code)

    async def _unexpected_error(self, _: HttpRequest, error: Exception) -> Response:
        return _error(f"the engine could not answer: {type(error).__name__}: {error}", 500)


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
    return Request(
        body.token_ids,
        sampling,
        n=params.n,
        priority=body.priority,
        name=body.request_id,
        alternatives=params.logprobs or 0,
        score_alternatives=params.prompt_logprobs,
    )


def _json(value: object) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")


def _error(message: str, status: int) -> Response:
    body = protocol.ErrorResponse(protocol.ErrorDetail(message, status))
    return Response(_encoder.encode(body), status_code=status, media_type="application/json")
