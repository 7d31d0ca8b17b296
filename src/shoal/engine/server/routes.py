"""The local engine behind HTTP: the common routes of `router`, and its own.

HTTP runs on the event loop and the model in a thread. Requests pass to the thread, and finished requests
come back a step's worth at a time. A client that disconnects aborts its request. All routes but /health and /metrics
require the engine's token, and weights load only from regular files below known folders.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shoal.engine.compute.logit_rules import Grammars, RuledLogits, check_rules, compiling_thread
from shoal.engine.compute.options import PauseMode
from shoal.engine.compute.request import Draft, Request, scoring
from shoal.engine.compute.step_engine import COUNTERS, GAUGES, StepEngine
from shoal.engine.compute.weight_loading import check_below, weight_file
from shoal.engine.server import protocol
from shoal.engine.server.engine_thread import EngineThread, TokenStream, pass_on, result
from shoal.engine.server.router import asked_in, bodiless, engine_app
from shoal.errors import EngineUnavailable, RequestRefused, ShoalError
from shoal.interfaces import EngineInfo, LogitRules
from shoal.net.server import HANDLERS, exposition, json, refusal
from shoal.types import Completion, FinishReason

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")


HUNG_S = 600.0  # a step of a large model on few cores takes a minute, and the first one on a GPU as long


class EngineServer:
    """One engine behind HTTP. Implements `router.ServedEngine`; `app` is the ASGI application.

    `crashed` is called when the engine cannot continue.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        crashed: Callable[[BaseException], None],
        token: str = "",
        weights: Sequence[Path] = (),
        model_dir: Path = Path(),
        hung_s: float = HUNG_S,
    ) -> None:
        """`weights` are the folders that new weights load from; a step longer than `hung_s` counts as hung.

        `model_dir` has the tokenizer, which only answers under a schema need.
        """
        self._engine = engine
        self._hung_s = hung_s
        self._crashed = crashed
        self._waiters: dict[Request, asyncio.Future[None]] = {}
        self._streams: set[TokenStream] = set()
        self._model_dir = model_dir
        self._grammars = Grammars(model_dir, engine.vocabulary)
        self._refused = self._failed_updates = 0
        self._failure = ""
        self._weights = tuple(folder.resolve() for folder in weights)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weights")
        more = [
            Route("/stream", self._stream, methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            bodiless("/resume", self._resume, method="POST"),
            bodiless("/is_paused", self._paused),
            bodiless("/weight_info", self._served),
            Route("/metrics", self._metrics),
        ]
        handlers = HANDLERS | {ShoalError: self._counted_refusal, Exception: HANDLERS[ShoalError]}
        free = ("/health", "/metrics")
        self.app = engine_app(self, token=token, more=more, free=free, lifespan=self._lifespan, handlers=handlers)

    def stop(self) -> None:
        """Ends all requests with their sampled tokens, so that they can continue elsewhere, and refuses new ones."""
        self._thread.call(lambda: self._engine.pause(PauseMode.ABORT))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(
            self._engine,
            deliver=partial(self._deliver, loop),
            crashed=lambda error: _soon(loop, self._crashed, error),
        )
        self._thread.start()
        self._compiling = compiling_thread()
        yield
        self._thread.stop()
        for executor in (self._reading, self._compiling):
            executor.shutdown(cancel_futures=True)

    def _deliver(self, loop: asyncio.AbstractEventLoop, finished: list[Request]) -> None:
        """Passes a step's results to the event loop; runs in the engine's thread."""
        if finished:
            _soon(loop, self._settle, finished)
        if news := [(stream, new) for stream in list(self._streams) if (new := stream.news()) is not None]:
            _soon(loop, pass_on, news)
            self._streams.difference_update([stream for stream, _ in news if stream.ended])

    def _settle(self, finished: list[Request]) -> None:
        for request in finished:
            waiter = self._waiters.pop(request, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` between two steps of the engine."""
        return await result(self._thread.call(function))

    async def generate(self, asked: protocol.GenerateRequest) -> protocol.GenerateResponse:
        """Implements `ServedEngine`."""
        request = _request(asked, self._adapter(asked.model))
        self._engine.check(request)
        if (matcher := await self._matcher(request)) is not None:
            request.rules = RuledLogits(LogitRules(), matcher, is_trained=True)
        await self._answered(request)
        return protocol.GenerateResponse([_choice(draft) for draft in request.drafts], request.name)

    async def _stream(self, http: HttpRequest) -> Response:
        """Answers with a line of JSON for each piece of the answer; an error before the first has its own status."""
        asked = await asked_in(http, protocol.StreamRequest)
        check_rules(asked.rules, self._engine.vocabulary)
        request = _request(protocol.GenerateRequest(asked.token_ids, asked.sampling_params))
        self._engine.check(request)
        if request.n != 1:
            raise RequestRefused(f"sampling_params.n: expected 1 in a stream, got {request.n}")
        request.rules = RuledLogits(asked.rules, await self._matcher(request))
        stream = TokenStream(request, asked.every)
        self._streams.add(stream)
        try:
            await self._call(lambda: self._engine.submit(request))
        except BaseException:
            self._streams.discard(stream)
            raise
        return StreamingResponse(self._lines(stream), media_type="application/x-ndjson")

    async def _matcher(self, request: Request) -> "LLMatcher | None":
        """Matcher of the request's grammar, if it has one. Raises `RequestRefused`."""
        sampling = request.sampling
        if not sampling.grammar:
            return None
        begun = request.prompt_ids[len(request.prompt_ids) - sampling.begun :]
        compiled = partial(self._grammars.matcher, sampling.grammar, sampling.stop_token_ids, begun)
        return await asyncio.get_running_loop().run_in_executor(self._compiling, compiled)

    async def _lines(self, stream: TokenStream) -> AsyncIterator[bytes]:
        try:
            reason = None
            while reason is None:
                tokens = await stream.queue.get()
                reason = tokens.finish_reason
                yield msgspec.json.encode(tokens) + b"\n"
        finally:
            self._streams.discard(stream)
            if not stream.request.finished:
                self._thread.call(lambda: self._engine.abort([stream.request]))

    async def _answered(self, request: Request) -> None:
        """Returns when a request has ended; a cancellation aborts it. Raises `RequestRefused` for what cannot be."""
        ended = self._waiters[request] = asyncio.get_running_loop().create_future()
        try:
            await self._call(lambda: self._engine.submit(request))
            await ended
        finally:
            if not ended.done() or ended.cancelled():
                self._waiters.pop(request, None)
                self._thread.call(lambda: self._engine.abort([request]))
        if failed := next((draft.failed for draft in request.drafts if draft.failed), ""):
            raise RequestRefused(failed)

    async def score(self, asked: protocol.LogprobsRequest) -> protocol.ScoreResponse:
        """Implements `ServedEngine`."""
        token_ids, listed = asked.token_ids, asked.others if isinstance(asked.others, list) else []
        if listed and len(listed) != len(token_ids) - 1:
            raise RequestRefused(f"others: expected {len(token_ids) - 1} lists of token ids, got {len(listed)}")
        for ids in (token_ids, *filter(None, listed)):
            self._engine.check_tokens(ids, self._engine.limits.max_model_len)
        if len(token_ids) == 1:
            return protocol.ScoreResponse([])
        request = scoring(token_ids, asked.others, self._adapter(asked.model))
        await self._answered(request)
        draft = request.drafts[0]
        if draft.finish_reason is FinishReason.ABORT:
            raise EngineUnavailable("scoring was aborted")
        return protocol.ScoreResponse(draft.scores, draft.ranked)

    async def _pause(self, http: HttpRequest) -> Response:
        name = http.query_params.get("mode", PauseMode.ABORT)
        if name not in list(PauseMode):
            raise RequestRefused(f"mode: expected one of {', '.join(PauseMode)}, got {name!r}")
        await result(await self._call(lambda: self._engine.pause(PauseMode(name))))
        return json(await self._paused())

    async def _resume(self) -> protocol.PausedState:
        await self._call(self._engine.resume)
        return await self._paused()

    async def _paused(self) -> protocol.PausedState:
        return protocol.PausedState(self._engine.paused)

    async def abort(self) -> int:
        """Implements `ServedEngine`."""
        return await self._call(self._engine.abort)

    async def update_weights(self, asked: protocol.UpdateWeightsRequest) -> protocol.WeightInfo:
        """Implements `ServedEngine`."""
        try:
            self._engine.check_update(asked.version)
            check_below(weight_file(Path(asked.path)), self._weights)
            # Reading and checking run in a thread: generation stops for the copy only.
            read = partial(self._engine.slots.staged, asked.version, Path(asked.path), asked.checksum)
            weights = await asyncio.get_running_loop().run_in_executor(self._reading, read)
        except RequestRefused as error:
            self._failed_updates += 1
            self._failure = f"version {asked.version}: {error}"
            raise
        self._failure = ""
        served: Future[int] = await self._call(lambda: self._engine.update(weights))
        await result(served)
        return await self._served()

    async def load_adapter(self, asked: protocol.LoadAdapterRequest) -> protocol.LoadedAdapters:
        """Implements `ServedEngine`."""
        path = Path(asked.lora_path)
        check_below(weight_file(path), self._weights)
        read = partial(self._engine.slots.adapter, asked.lora_name, asked.version, path, asked.checksum)
        adapter = await asyncio.get_running_loop().run_in_executor(self._reading, read)
        await self._call(lambda: self._engine.load_adapter(adapter))
        return await self._adapters()

    async def unload_adapter(self, asked: protocol.UnloadAdapterRequest) -> protocol.LoadedAdapters:
        """Implements `ServedEngine`."""
        await self._call(lambda: self._engine.unload_adapter(asked.lora_name))
        return await self._adapters()

    async def _adapters(self) -> protocol.LoadedAdapters:
        served = await self._call(lambda: {name: one.version for name, one in self._engine.adapters.items()})
        return protocol.LoadedAdapters(served)

    async def _served(self) -> protocol.WeightInfo:
        return await self._call(lambda: protocol.WeightInfo(self._engine.version, self._engine.checksum, self._failure))

    async def health(self) -> None:
        """Implements `ServedEngine`."""
        if (turn_s := self._thread.turn_s) > self._hung_s:
            raise EngineUnavailable(f"the engine hangs: it has been at one step for {turn_s:.0f} s")

    async def _metrics(self, _: HttpRequest) -> Response:
        def values(names: Sequence[str]) -> dict[str, float]:
            return {name: getattr(self._engine, name) for name in names}

        counters, gauges = await self._call(lambda: (values(COUNTERS), values(GAUGES)))
        own = {"refused": self._refused, "failed_updates": self._failed_updates}
        return exposition("shoal_engine", counters | own, gauges)

    async def info(self) -> EngineInfo:
        """Implements `ServedEngine`."""
        return await self._call(self._engine.info)

    def _adapter(self, model: str | None) -> str:
        """Adapter that a request names; empty for the model itself."""
        return "" if model in (None, str(self._model_dir)) else str(model)

    async def _counted_refusal(self, _: HttpRequest, error: Exception) -> Response:
        self._refused += 1
        return refusal(error)


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """Calls `function` on the loop; a closed loop needs no call."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)


def _request(body: protocol.GenerateRequest, adapter: str = "") -> Request:
    """Engine request of a body. Raises `RequestRefused` for values out of range."""
    params, sampling = body.sampling_params, protocol.sampling_of(body.sampling_params)
    return Request(body.token_ids, sampling, n=params.n, priority=body.priority, name=body.request_id, adapter=adapter)


def _choice(draft: Draft) -> protocol.GeneratedChoice:
    """Response choice of a finished completion."""
    assert draft.finish_reason is not None
    streams = tuple(draft.sampled), tuple(draft.logprobs), tuple(draft.versions)
    routing, forced, kept = draft.recorded_routing(), tuple(draft.forced), tuple(draft.kept)
    return protocol.choice_of(draft.index, Completion(*streams, draft.finish_reason, routing, forced, kept))
