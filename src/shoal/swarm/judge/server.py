"""The judge serves its messages and its leaderboard over HTTP.

    GET  /                   the leaderboard
    GET  /leaderboard.json   its rows for programs
    GET  /ledger             `PublicLedger`: commitments, and the seeds of finished rounds
    POST /challenge          a signed `ChallengeRequest` -> a signed `Challenge`
    POST /verdict            signed `Answers` -> a signed `ChallengeVerdict`
    GET  /sittings/N         ids of the challenges of a finished round
    GET  /transcripts/ID     `Transcript`: questions asked, answers, grades

Messages are the wire bytes of `shoal.swarm.judge.messages`; errors are one line of text.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from shoal import wire
from shoal.errors import ShoalError
from shoal.net.server import body, guarded
from shoal.swarm.judge import page
from shoal.swarm.judge.judging import Judge
from shoal.swarm.judge.messages import MOST_BYTES
from shoal.swarm.judge.store import Standing

RESTS = 50.0
"""Rest between two computations of the leaderboard, relative to the time of one."""
WIRE = "application/octet-stream"
_HEADERS = {
    "Content-Security-Policy": page.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class JudgeServer:
    """HTTP server of a judge; `app` is the ASGI application."""

    def __init__(self, judge: Judge, specialties: Sequence[str]) -> None:
        """`specialties` are the columns of the leaderboard."""
        self._judge = judge
        self._specialties = tuple(specialties)
        self._standings: list[Standing] = []
        self._stale_s = 0.0  # of the monotonic clock: from when on they are asked for again
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/style.css", self._style),
                Route("/leaderboard.json", self._leaderboard),
                Route("/ledger", self._ledger),
                Route("/challenge", self._challenge, methods=["POST"]),
                Route("/verdict", self._verdict, methods=["POST"]),
                Route("/sittings/{number:int}", self._round),
                Route("/transcripts/{id}", self._transcript),
            ],
            middleware=[Middleware(guarded, media_type=WIRE)],
            exception_handlers={ShoalError: _refusal},
        )

    async def _page(self, _: Request) -> Response:
        html = page.leaderboard_html(self._judge.peer_id, self._newest(), self._specialties)
        return HTMLResponse(html, headers=_HEADERS)

    def _newest(self) -> list[Standing]:
        """Rows of the leaderboard, computed again in at most 2 % of the loop's time, however often it is read."""
        began_s = time.monotonic()
        if began_s >= self._stale_s:
            self._standings = self._judge.store.standings(self._judge.now_s())
            self._stale_s = time.monotonic() + RESTS * (time.monotonic() - began_s)
        return self._standings

    async def _style(self, _: Request) -> Response:
        return Response(page.STYLE, media_type="text/css", headers=_HEADERS)

    async def _leaderboard(self, _: Request) -> Response:
        standings = [{**asdict(one), "specialties": dict(one.specialties)} for one in self._newest()]
        body = msgspec.json.encode({"judge": self._judge.peer_id, "standings": standings})
        return Response(body, media_type="application/json", headers=_HEADERS)

    async def _ledger(self, _: Request) -> Response:
        return Response(wire.encode(self._judge.ledger()), media_type=WIRE)

    async def _challenge(self, http: Request) -> Response:
        return Response(await self._judge.challenge(await body(http, MOST_BYTES)), media_type=WIRE)

    async def _verdict(self, http: Request) -> Response:
        return Response(await self._judge.verdict(await body(http, MOST_BYTES)), media_type=WIRE)

    async def _round(self, http: Request) -> Response:
        return Response(wire.encode(self._judge.transcripts(http.path_params["number"])), media_type=WIRE)

    async def _transcript(self, http: Request) -> Response:
        return Response(wire.encode(self._judge.transcript(http.path_params["id"])), media_type=WIRE)


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    return Response(f"{error}\n", status_code=error.http_status, media_type="text/plain", headers=_HEADERS)
