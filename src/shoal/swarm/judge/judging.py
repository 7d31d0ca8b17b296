"""A judge commits to rounds, issues challenges, grades answers, and serves its messages and leaderboard over HTTP.

    GET  /                   the leaderboard, a page without a script; every text of a taker is escaped
    GET  /leaderboard.json   its rows for programs
    GET  /ledger             `PublicLedger`: commitments, and the seeds of finished rounds
    POST /challenge          a signed `ChallengeRequest` -> a signed `Challenge`
    POST /verdict            signed `Answers` -> a signed `ChallengeVerdict`

Messages are the wire bytes of `shoal.swarm.judge.messages`; an error is JSON with one sentence.

A challenge costs the judge two draws of every question and one scoring of every answer, so requests are limited. Each
peer has a separate limit. All peers that never answered share one, since identities cost nothing, and those of one
address share a part of it; a request refused by a shared limit does not count against the peer's.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal import wire
from shoal.errors import ConfigError, TaskError, WireError
from shoal.interfaces import Scorer
from shoal.net.identity import Identity
from shoal.net.server import HANDLERS, PAGE_HEADERS, Refused, address_of, body, guarded, json, page_files
from shoal.swarm.judge.messages import (
    MOST_BYTES,
    Answers,
    Challenge,
    ChallengeQuestion,
    ChallengeRequest,
    ChallengeVerdict,
    GradedAnswer,
    PublicLedger,
    Revealed,
    Round,
    commitment_of,
    opened,
    signed,
)
from shoal.swarm.judge.store import NEWEST, JudgeStore, Record, Standing
from shoal.swarm.trust.rates import MOST_RATED, Bucket, Buckets, Recent
from shoal.tasks.procedural_client import ProceduralClient, Spec
from shoal.types import RewardStatus, Split, Task, seed_for

SEED_BYTES = 32
SKEW_S = 300.0
"""Seconds that a taker's clock may be off."""
MOST_TIMEOUTS = 2
"""Timeouts in one challenge after which its other answers are not scored, so that it cannot hold the scorer for
long."""
MOST_FAILED = 3
"""Gradings of one challenge, after which an answer that the scorer fails at counts as wrong: it may break the
scorer."""
MOST_CHALLENGE = 0.8
"""Share of a message that the questions of a typical challenge may take; others are longer."""
PUBLISHED = 64
"""Rounds in the ledger."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a judge."""

    each: int = 3
    """Questions of every specialty in a challenge."""
    round_s: float = 3600.0
    answer_s: float = 600.0
    """Seconds from a challenge to its deadline; a round's seed is revealed after its last deadline."""
    peer_every_s: float = 30.0
    """Seconds between challenges of one peer, on average."""
    peer_burst: float = 10.0
    newcomers_every_s: float = 0.1
    """Seconds between challenges of all peers that never answered one."""
    newcomers_burst: float = 30.0
    address_every_s: float = 0.4
    """Seconds between challenges of all peers of one address that never answered one."""
    address_burst: float = 15.0
    open_at_once: int = 3
    """Open challenges of one peer."""


class Judge:
    """Judge that answers signed messages with signed messages. One event loop."""

    def __init__(
        self,
        store: JudgeStore,
        identity: Identity,
        specialties: Sequence[Spec],
        drawer: ProceduralClient,
        scorer: Scorer,
        rules: Rules | None = None,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """New rounds have these `specialties`; a round that has begun keeps its own.

        `clock` gives Unix time; rates follow the monotonic `steady`. Raises `ConfigError` when a typical challenge
        would not fit into a message. Blocks.
        """
        self.store = store
        self.rules = rules or Rules()
        self.specialties = tuple(specialties)
        self.now_s = clock
        self.peer_id = identity.peer_id
        self._identity, self._drawer, self._scorer, self._steady = identity, drawer, scorer, steady
        self._turn = asyncio.Lock()
        self._grading: set[str] = set()
        self._failed: Recent[str, int] = Recent(MOST_RATED)  # gradings by challenge in which the scorer failed
        rate_per_s, burst = 1 / self.rules.peer_every_s, self.rules.peer_burst
        self._peers, self._unanswering = Buckets(rate_per_s, burst), Buckets(rate_per_s, burst)
        self._newcomers = Bucket(1 / self.rules.newcomers_every_s, self.rules.newcomers_burst)
        self._addresses = Buckets(1 / self.rules.address_every_s, self.rules.address_burst)
        trial = draw_questions(drawer, self._round(0, 0.0, b""), b"", self.peer_id, "", 0)
        size = sum(len(wire.encode(ChallengeQuestion(task.service, task.messages))) for task in trial)
        if size > MOST_CHALLENGE * MOST_BYTES:
            raise ConfigError(
                f"questions: expected fewer of every specialty: {len(trial)} are {size} bytes of at most {MOST_BYTES}"
            )

    def ledger(self) -> PublicLedger:
        """Newest commitments, up to the next round's, and the seeds of finished rounds."""
        self._current()
        kept = self.store.rounds(PUBLISHED)
        over = [(_stated(statement), seed) for seed, statement in kept]
        seeds = [Revealed(one.number, seed) for one, seed in over if one.reveals_s < self.now_s()]
        return PublicLedger(
            tuple(statement for _, statement in kept), tuple(signed(self._identity, one) for one in seeds)
        )

    async def challenge(self, data: bytes, address: str = "") -> bytes:
        """Issues a signed `Challenge` for a signed `ChallengeRequest` from a network address. Raises `Refused`."""
        peer_id, ask = _read(data, ChallengeRequest)
        if ask.judge != self.peer_id:
            raise Refused(403, f"this is for the judge {ask.judge[:64]}; here is {self.peer_id}")
        if abs(ask.sent_s - self.now_s()) > SKEW_S:
            raise Refused(403, f"sent at {ask.sent_s:.0f}, and it is {self.now_s():.0f} here: set your clock")
        self._admit(peer_id, address)
        async with self._turn:  # an attempt's number is given once its questions are there
            now_s = self.now_s()
            round_, seed = self._current()
            last_s, still_open, _ = self.store.history(peer_id, now_s)
            if ask.sent_s <= last_s:
                raise Refused(409, "you asked for this challenge before; sign a new message for a new one")
            if still_open >= self.rules.open_at_once:
                raise Refused(429, f"answer one of your {self.rules.open_at_once} open challenges first")
            attempt = self.store.attempts(round_.number, peer_id, ask.model)
            tasks = await self._tasks(round_, seed, peer_id, ask.model, attempt)
            questions = tuple(ChallengeQuestion(task.service, task.messages) for task in tasks)
            id_, deadline_s = secrets.token_hex(16), now_s + self.rules.answer_s
            asked = (ask.model, ask.arm, ask.round, attempt, ask.sent_s)
            self.store.issue(Record(id_, round_.number, peer_id, *asked, deadline_s, data))
        return signed(self._identity, Challenge(id_, round_.number, peer_id, ask, attempt, deadline_s, questions))

    async def verdict(self, data: bytes) -> bytes:
        """Grades signed `Answers`; returns a signed `ChallengeVerdict`. Raises `Refused`."""
        peer_id, answers = _read(data, Answers)
        record = self.store.challenge(answers.challenge)
        if record is None or record.peer_id != peer_id or answers.judge != self.peer_id:
            raise Refused(404, "you have no such challenge of this judge")
        if record.score is not None:
            raise Refused(409, "this challenge is answered")
        if record.deadline_s < self.now_s():
            raise Refused(409, "the deadline of this challenge is over")
        if record.id in self._grading:  # else the same answers sent often would keep the scorer busy
            raise Refused(409, "this challenge is being graded")
        self._grading.add(record.id)
        try:
            found = self.store.round(record.sitting)
            assert found is not None
            round_ = _stated(found[1])
            if len(answers.texts) != (most := round_.each * len(round_.specialties)):  # before the draws, which cost
                raise Refused(400, f"answers: expected {most}, got {len(answers.texts)}")
            async with self._turn:
                tasks = await self._tasks(round_, found[0], peer_id, record.model, record.attempt)
            graded = await grade(self._scorer, tasks, answers.texts)
            failed = self._failed.get(record.id, 0) + 1
            if failed < MOST_FAILED and any(answer.status is RewardStatus.FAILED for answer in graded):
                self._failed[record.id] = failed
                raise Refused(503, "the scorer failed; send the answers again")
            score = sum(answer.passed for answer in graded) / len(graded)
            self.store.answer(record.id, data, graded, score)
        finally:
            self._grading.remove(record.id)
        return signed(self._identity, ChallengeVerdict(record.id, score, tuple(graded)))

    def _admit(self, peer_id: str, address: str) -> None:
        """Raises `Refused` for a peer that asks too often."""
        newcomer, now_s = not self.store.history(peer_id, 0.0)[2], self._steady()
        if newcomer and not (self._addresses.take(address, now_s) and self._newcomers.take(now_s)):
            raise Refused(429, "too many newcomers ask; try again in a few seconds")
        if not (self._unanswering if newcomer else self._peers).take(peer_id, now_s):
            if newcomer:
                self._newcomers.spend(-1.0)  # a name that asks too often takes nothing of the others
                self._addresses.take(address, now_s, -1.0)
            raise Refused(429, f"one challenge every {self.rules.peer_every_s:g} s, please")

    def _current(self) -> tuple[Round, bytes]:
        """Returns the current round with its seed; commits to it and to the next round if need be."""
        now_s = self.now_s()
        newest = [(_stated(statement), seed) for seed, statement in self.store.rounds(2)]
        while not newest or newest[0][0].opens_s <= now_s or newest[-1][0].opens_s > now_s:  # the clock was set back
            last, seed = newest[0][0] if newest else None, secrets.token_bytes(SEED_BYTES)
            opens_s = max(last.closes_s, now_s) if last and last.opens_s <= now_s else now_s
            round_ = self._round(last.number + 1 if last else 0, opens_s, commitment_of(seed))
            self.store.put_round(round_.number, seed, signed(self._identity, round_))
            newest.insert(0, (round_, seed))
            del newest[2:]
        return next(one for one in newest if one[0].opens_s <= now_s)

    def _round(self, number: int, opens_s: float, commitment: bytes) -> Round:
        closes_s = opens_s + self.rules.round_s
        reveals_s = closes_s + self.rules.answer_s
        return Round(number, opens_s, closes_s, reveals_s, commitment, self.rules.each, self.specialties)

    async def _tasks(self, round_: Round, seed: bytes, peer_id: str, model: str, attempt: int) -> list[Task]:
        try:
            return await asyncio.to_thread(draw_questions, self._drawer, round_, seed, peer_id, model, attempt)
        except TaskError as error:
            raise Refused(503, f"a question could not be drawn: {error}") from error


def draw_questions(
    drawer: ProceduralClient, round_: Round, seed: bytes, peer_id: str, model: str, attempt: int
) -> list[Task]:
    """Draws the questions of a challenge from the round and its seed; all are held out. Blocks. Raises `TaskError`.

    `attempt` counts the challenges of this peer and model in this round, from 0.
    """
    return [
        drawer.draw(one, Split.EVAL, 0, seed_for("judge", seed.hex(), peer_id, model, attempt, one.dataset, position))
        for one in round_.specialties
        for position in range(round_.each)
    ]


async def grade(scorer: Scorer, tasks: Sequence[Task], texts: Sequence[str]) -> list[GradedAnswer]:
    """Grades one answer at a time, so that no taker has more than one of the scorer's processes."""
    graded: list[GradedAnswer] = []
    for task, text in zip(tasks, texts, strict=True):
        if sum(answer.status is RewardStatus.TIMED_OUT for answer in graded) >= MOST_TIMEOUTS:
            graded.append(GradedAnswer(task.service, 0.0, RewardStatus.TIMED_OUT))
            continue
        (reward,) = await scorer.score(task, [text])
        status = RewardStatus.TIMED_OUT if reward.exhausted else reward.status
        graded.append(GradedAnswer(task.service, reward.value, status))
    return graded


def _stated(statement: bytes) -> Round:
    return opened(statement, Round)[1]


def _read(data: bytes, type_: type[T]) -> tuple[str, T]:
    try:
        return opened(data, type_)
    except WireError as error:
        raise Refused(400, str(error)) from error


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
        return Response(await self._judge.challenge(await body(http, MOST_BYTES), address_of(http)), media_type=WIRE)

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
