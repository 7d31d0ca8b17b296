"""`shoal rewards serve`: the scorer over HTTP, with a run's own limits, for one machine or many.

    POST /score      {"scorer": ..., "answers": [...], "truth": ..., "info": ..., "receipt": ...} -> {"rewards": [...]}
    GET  /health     {"status": "ok", "backend": ...}
    GET  /metrics    for Prometheus

A client's checker decides what runs here, so the server takes only checkers of a sandbox or a worker process. The
user's functions and judges stay with the client.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal import checker
from shoal.checker import Spec
from shoal.config import RewardConfig
from shoal.errors import ShoalError, TaskError
from shoal.net.server import (
    HANDLERS,
    Refused,
    body,
    decoded,
    exposition,
    guarded,
    json,
    refusal,
    serving,
    until_cancelled,
)
from shoal.reward.code import tests_in
from shoal.reward.remote import MOST_ANSWERS, MOST_BODY_BYTES, ScoreReply, ScoreRequest
from shoal.reward.service import RewardService
from shoal.sandbox.runner import probe
from shoal.types import Task

MOST_TEST_S = 60.0
MOST_MEMORY_MB = 2048
MOST_TESTS = 1024
MOST_WAITING = 1024
MOST_RUN_S = 100_000.0
"""Seconds of one request, if each test of each answer takes all its time."""
MOST_HELD_BYTES = 4 * MOST_BODY_BYTES
"""Bytes of the bodies of all requests together, from their first byte to their rewards."""


class RewardServer:
    """The server's ASGI `app` over a started service."""

    def __init__(self, service: RewardService, *, token: str = "", most_held_bytes: int = MOST_HELD_BYTES) -> None:
        """With a token, every client must have it.

        A request beyond `MOST_WAITING` requests, or beyond `most_held_bytes` of bodies, gets 503.
        """
        self._service = service
        self._most_held_bytes = most_held_bytes
        self.held_bytes = 0
        """Bytes of the bodies of unanswered requests."""
        self._waiting = 0
        self._counts = {"requests": 0, "answers": 0, "refused": 0}
        self.app = Starlette(
            routes=[
                Route("/score", self._score, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            middleware=[Middleware(guarded, token=token, free=("/health", "/metrics"))],
            exception_handlers={**HANDLERS, ShoalError: self._refused},
        )

    async def _score(self, http: Request) -> Response:
        if self._waiting >= MOST_WAITING:
            raise Refused(503, f"{self._waiting} requests wait already")
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            held += count
            self.held_bytes += count
            if self.held_bytes > self._most_held_bytes:
                raise Refused(503, f"{self.held_bytes} bytes of requests are held already")

        self._waiting += 1
        try:
            return await self._reply(await body(http, MOST_BODY_BYTES, on_bytes=hold))
        finally:
            self._waiting -= 1
            self.held_bytes -= held

    async def _reply(self, data: bytes) -> Response:
        request = decoded(data, ScoreRequest)
        try:
            spec = checker.spec_of(checker.to_json(request.scorer), "scorer")
            why = asks_too_much(spec, request.info, len(request.answers))
        except (TaskError, ValueError, AttributeError) as error:
            raise Refused(400, str(error)) from error
        if len(request.answers) > MOST_ANSWERS:
            raise Refused(413, f"expected at most {MOST_ANSWERS} answers, got {len(request.answers)}")
        if not checker.is_confined(spec):
            raise Refused(403, "function and judge are not run for others; leave reward.urls to the rest")
        if why:
            raise Refused(403, why)
        task = Task("remote", "remote", (), request.truth, request.info, request.receipt)
        rewards = await self._service.score_by(spec, task, request.answers)
        self._counts["requests"] += 1
        self._counts["answers"] += len(rewards)
        return json(ScoreReply(rewards))

    async def _health(self, _: Request) -> Response:
        works = [backend.value for backend, why in probe().items() if not why]
        return json({"status": "ok", "backend": works[0] if works else None, "waiting": self._waiting})

    async def _metrics(self, _: Request) -> Response:
        return exposition("shoal_rewards", self._counts, self._service.values)

    async def _refused(self, _: Request, error: Exception) -> Response:
        self._counts["refused"] += 1
        return refusal(error)


def asks_too_much(spec: Spec, info: str, answers: int) -> str:
    """The limit of a stranger's programs that a request exceeds; empty when it exceeds none.

    Raises `TaskError` for invalid tests, and any error of reading the task's `info`.

    >>> info = '{"tests": [{"stdout": "1"}]}'
    >>> asks_too_much(checker.Code(), info, 8), asks_too_much(checker.Code(timeout_s=3600), info, 8)
    ('', 'scorer.timeout_s: expected at most 60, got 3600')
    """
    for code in checker.leaves(spec):
        if isinstance(code, checker.Code):
            for name, asked, most in _demands(code, info, answers):
                if asked > most:
                    return f"{name}: expected at most {most:g}, got {asked:g}"
    return ""


def _demands(code: checker.Code, info: str, answers: int) -> Iterator[tuple[str, float, float]]:
    """Demands of a request by name, and the most that each may be."""
    yield "scorer.timeout_s", code.timeout_s, MOST_TEST_S
    yield "scorer.memory_mb", code.memory_mb, MOST_MEMORY_MB
    tests = len(tests_in(info))
    yield "info.tests", tests, MOST_TESTS
    yield "seconds of all tests of all answers together", tests * answers * code.timeout_s, MOST_RUN_S


async def serve_rewards(
    config: RewardConfig, *, host: str, port: int, token: str, announce: Callable[[str], None], log: Path
) -> None:
    """Scores until it is cancelled. `announce` gets the URL. Raises a `ShoalError`."""
    async with (
        RewardService(config, log) as service,  # before it listens: a failed start ends the command
        serving(RewardServer(service, token=token).app, host, port) as url,
    ):
        announce(url)
        await until_cancelled()
