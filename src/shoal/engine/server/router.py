"""HTTP routes of any engine, in vLLM's form. `routes` has the routes that only Shoal's engine serves.

A request whose client disconnects is cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Protocol, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ExceptionHandler, StatelessLifespan

from shoal.engine.server import protocol
from shoal.errors import RequestRefused
from shoal.interfaces import EngineInfo
from shoal.net.server import HANDLERS, body, decoded, disconnected, guarded, json

T = TypeVar("T")


class ServedEngine(Protocol):
    """Engine behind the routes. Methods raise `RequestRefused` and `EngineUnavailable`."""

    async def generate(self, asked: protocol.GenerateRequest) -> protocol.GenerateResponse:
        """Samples completions; a cancellation aborts the request."""

    async def score(self, asked: protocol.LogprobsRequest) -> protocol.ScoreResponse:
        """Logprobs of given tokens; a cancellation aborts the request."""

    async def abort(self) -> int:
        """Ends all requests with their sampled tokens; returns how many, 0 where the engine does not count them."""

    async def update_weights(self, asked: protocol.UpdateWeightsRequest) -> protocol.WeightInfo:
        """Loads a Version; returns once it is served."""

    async def load_adapter(self, asked: protocol.LoadAdapterRequest) -> protocol.LoadedAdapters:
        """Loads an adapter under a name."""

    async def unload_adapter(self, asked: protocol.UnloadAdapterRequest) -> protocol.LoadedAdapters:
        """Forgets an adapter."""

    async def health(self) -> None:
        """Returns while the engine works. Raises `EngineUnavailable` otherwise."""

    async def info(self) -> EngineInfo:
        """State of the engine."""


async def asked_in(http: Request, kind: type[T]) -> T:
    """The body of a request. Its lists are counted before they are made: a second went into 8 MiB of empty ones."""
    data = await body(http, protocol.MAX_BODY_BYTES)
    if (lists := data.count(b"[")) > protocol.MOST_LISTS:
        raise RequestRefused(f"body: expected at most {protocol.MOST_LISTS} lists, got {lists}")
    return decoded(data, kind)


def posted(path: str, kind: type[T], answer: Callable[[T], Coroutine[object, object, object]]) -> Route:
    """Route that answers a body of a kind."""

    async def handle(http: Request) -> Response:
        return json(await answer(await asked_in(http, kind)))

    return Route(path, handle, methods=["POST"])


def bodiless(path: str, answer: Callable[[], Awaitable[object]], *, method: str = "GET") -> Route:
    """Route that answers without a body."""

    async def handle(_: Request) -> Response:
        return json(await answer())

    return Route(path, handle, methods=[method])


def engine_app(
    engine: ServedEngine,
    *,
    token: str,
    more: Sequence[BaseRoute] = (),
    free: Collection[str] = (),
    lifespan: StatelessLifespan[Starlette] | None = None,
    handlers: dict[type[Exception], ExceptionHandler] = HANDLERS,
) -> Starlette:
    """Application of an engine: the common routes and `more`, all behind the token but the `free` ones."""

    def cancellable(path: str, kind: type[T], answer: Callable[[T], Coroutine[object, object, object]]) -> Route:
        async def handle(http: Request) -> Response:
            asked = await asked_in(http, kind)
            answering = asyncio.create_task(answer(asked), name=path)
            gone = asyncio.create_task(disconnected(http), name="disconnection")
            try:
                await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                return json(answering.result()) if answering.done() else Response(status_code=protocol.CLIENT_GONE)
            finally:
                gone.cancel()
                answering.cancel()

        return Route(path, handle, methods=["POST"])

    async def abort() -> dict[str, int]:
        return {"aborted": await engine.abort()}

    async def health() -> dict[str, str]:
        await engine.health()
        return {"status": "ok"}

    routes = [
        cancellable("/inference/v1/generate", protocol.GenerateRequest, engine.generate),
        cancellable("/score", protocol.LogprobsRequest, engine.score),
        posted("/update_weights", protocol.UpdateWeightsRequest, engine.update_weights),
        posted("/v1/load_lora_adapter", protocol.LoadAdapterRequest, engine.load_adapter),
        posted("/v1/unload_lora_adapter", protocol.UnloadAdapterRequest, engine.unload_adapter),
        bodiless("/abort_requests", abort, method="POST"),
        bodiless("/health", health),
        bodiless("/info", engine.info),
    ]
    guard = Middleware(guarded, token=token, free=free)
    return Starlette(routes=[*routes, *more], middleware=[guard], lifespan=lifespan, exception_handlers=handlers)
