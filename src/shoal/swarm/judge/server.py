"""The judge serves its messages and its leaderboard over HTTP.

    GET  /                   the leaderboard, a page without a script; every text of a taker is escaped
    GET  /leaderboard.json   its rows for programs
    GET  /ledger             `PublicLedger`: commitments, and the seeds of finished rounds
    POST /challenge          a signed `ChallengeRequest` -> a signed `Challenge`
    POST /verdict            signed `Answers` -> a signed `ChallengeVerdict`

Messages are the wire bytes of `shoal.swarm.judge.messages`; an error is JSON with one sentence.
"""

import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal import wire
from shoal.net.server import HANDLERS, PAGE_HEADERS, body, guarded, json, page_files
from shoal.swarm.judge.judging import Judge
from shoal.swarm.judge.messages import MOST_BYTES
from shoal.swarm.judge.store import NEWEST, Standing

RESTS = 50.0
"""Pause between two computations of the leaderboard, as a multiple of the time of one."""
WIRE = "application/octet-stream"
_PAGE = files("shoal.swarm.judge").joinpath("leaderboard.html").read_text()
_HEADS = ("Rank", "Peer", "pass@1", "at least", "Model", "Condition", "Round", "Challenges", "Unanswered")


class JudgeServer:
    """HTTP server of a judge; `app` is the ASGI application."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._standings: list[Standing] = []
        self._stale_s = 0.0
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                *page_files("shoal.swarm.judge"),
                Route("/leaderboard.json", self._leaderboard),
                Route("/ledger", self._ledger),
                Route("/challenge", self._challenge, methods=["POST"]),
                Route("/verdict", self._verdict, methods=["POST"]),
            ],
            middleware=[Middleware(guarded, media_type=WIRE)],
            exception_handlers=HANDLERS,
        )

    async def _page(self, _: Request) -> Response:
        names = [one.dataset for one in self._judge.specialties]
        html = leaderboard_html(self._judge.peer_id, self._newest(), names)
        return Response(html, media_type="text/html", headers=PAGE_HEADERS)

    async def _leaderboard(self, _: Request) -> Response:
        return json({"judge": self._judge.peer_id, "standings": self._newest()}, headers=PAGE_HEADERS)

    async def _ledger(self, _: Request) -> Response:
        return Response(wire.encode(self._judge.ledger()), media_type=WIRE)

    async def _challenge(self, http: Request) -> Response:
        return Response(await self._judge.challenge(await body(http, MOST_BYTES)), media_type=WIRE)

    async def _verdict(self, http: Request) -> Response:
        return Response(await self._judge.verdict(await body(http, MOST_BYTES)), media_type=WIRE)

    def _newest(self) -> list[Standing]:
        """Rows of the leaderboard, computed again in at most 2 % of the loop's time, however often it is read."""
        began_s = time.monotonic()
        if began_s >= self._stale_s:
            self._standings = self._judge.store.standings(self._judge.now_s())
            self._stale_s = time.monotonic() + RESTS * (time.monotonic() - began_s)
        return self._standings


def leaderboard_html(judge: str, standings: Sequence[Standing], specialties: Sequence[str]) -> str:
    """Page of the judge with this peer id, best peer first."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in (*_HEADS, *specialties))
    rows = "".join(_row(rank, one, specialties) for rank, one in enumerate(standings, 1))
    return _PAGE.format(newest=NEWEST, judge=escape(judge), heads=heads, rows=rows)


def _row(rank: int, one: Standing, specialties: Sequence[str]) -> str:
    peer, *named = (f"<td class=name>{escape(text)}</td>" for text in (one.peer_id[:12], one.model, one.arm))
    shares = [f"{one.specialties[name]:.0%}" if name in one.specialties else "" for name in specialties]
    counts = (f"{one.round:,}", f"{one.challenges:,}", f"{one.unanswered:,}", *shares)
    score = f"<td>{one.score:.3f}</td><td>{one.at_least:.3f}</td>"
    return f"<tr><td>{rank}</td>{peer}{score}{''.join(named)}{''.join(f'<td>{text}</td>' for text in counts)}</tr>"
