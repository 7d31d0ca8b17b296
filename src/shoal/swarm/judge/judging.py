"""A judge commits to rounds, issues challenges and grades answers.

A challenge costs the judge two draws of every question and one scoring of every answer, so requests are limited. Each
peer has a limit of its own. All peers that never answered share one, since identities cost nothing.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal import wire
from shoal.errors import ConfigError, JudgeError, TaskError, WireError
from shoal.interfaces import Scorer
from shoal.swarm.identity import Identity
from shoal.swarm.judge.commitment import SEED_BYTES, commitment_of, question_index
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
    Specialty,
    Transcript,
    opened,
    signed,
)
from shoal.swarm.judge.store import JudgeStore, KeptRound, Record
from shoal.swarm.trust import Bucket
from shoal.tasks.procedural_client import ProceduralClient, Spec
from shoal.types import RewardStatus, Split, Task

SKEW_S = 300.0
"""Seconds that a taker's clock may be off."""
MOST_TIMEOUTS = 2
"""Timeouts in one challenge after which its other answers are not scored, so that it cannot hold the scorer for
long."""
MOST_CHALLENGE = 0.8
"""Share of a message that the questions of a typical challenge may take; others are longer."""
PEERS = 4096
"""Peers whose rates are remembered."""
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
    newcomers_every_s: float = 2.0
    """Seconds between challenges of all peers that never answered one."""
    newcomers_burst: float = 30.0
    open_at_once: int = 3
    """Open challenges of one peer."""


class ChallengeRefused(JudgeError):
    """Refusal of a request; `status` is HTTP's."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = self.http_status = status


class Judge:
    """Judge that answers signed messages with signed messages. One event loop."""

    def __init__(
        self,
        store: JudgeStore,
        identity: Identity,
        specialties: Sequence[Specialty],
        drawer: ProceduralClient,
        scorer: Scorer,
        rules: Rules | None = None,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """New rounds have these `specialties`; a round that has begun keeps its own.

        `clock` gives Unix time; rates follow the monotonic `steady`.
        """
        self.store = store
        self.rules = rules or Rules()
        self._identity = identity
        self._specialties = tuple(specialties)
        self._drawer = drawer
        self._scorer = scorer
        self._clock = clock
        self._steady = steady
        self._turn = asyncio.Lock()
        self._grading: set[str] = set()
        self._peers: OrderedDict[str, Bucket] = OrderedDict()
        self._newcomers = Bucket(1 / self.rules.newcomers_every_s, self.rules.newcomers_burst)

    def rehearse(self) -> None:
        """Draws a trial challenge. Blocks. Raises `ConfigError` when such a challenge would not fit into a message."""
        round_ = Round(0, 0.0, 0.0, 0.0, b"", self.rules.each, self._specialties)
        tasks = draw_questions(self._drawer, round_, bytes(SEED_BYTES), self.peer_id, "", 0)
        size = sum(len(wire.encode(ChallengeQuestion(task.service, task.messages))) for task in tasks)
        if size > MOST_CHALLENGE * MOST_BYTES:
            raise ConfigError(
                f"questions: expected fewer of every specialty: {len(tasks)} are {size} bytes of at most {MOST_BYTES}"
            )

    @property
    def peer_id(self) -> str:
        """Peer id of the judge."""
        return self._identity.peer_id

    def now_s(self) -> float:
        """Unix time by the judge's clock."""
        return self._clock()

    def ledger(self) -> PublicLedger:
        """Newest commitments, up to the next round's, and the seeds of finished rounds."""
        self._current()
        kept = self.store.newest_rounds(PUBLISHED)
        over = [one for one in kept if one.reveals_s < self._clock()]
        seeds = tuple(signed(self._identity, Revealed(one.number, one.seed)) for one in over)
        return PublicLedger(tuple(one.statement for one in kept), seeds)

    async def challenge(self, data: bytes) -> bytes:
        """Issues a signed `Challenge` for a signed `ChallengeRequest`. Raises `ChallengeRefused`."""
        peer_id, ask = _read(data, ChallengeRequest)
        if ask.judge != self.peer_id:
            raise ChallengeRefused(403, f"this is for the judge {ask.judge[:64]}; here is {self.peer_id}")
        if abs(ask.sent_s - self._clock()) > SKEW_S:
            raise ChallengeRefused(403, f"sent at {ask.sent_s:.0f}, and it is {self._clock():.0f} here: set your clock")
        self._admit(peer_id)
        async with self._turn:  # an attempt's number is given once its questions are there
            now_s = self._clock()
            kept = self._current()
            if ask.sent_s <= self.store.last_asked_s(peer_id):
                raise ChallengeRefused(409, "you asked for this challenge before; sign a new message for a new one")
            if self.store.open_challenges(peer_id, now_s) >= self.rules.open_at_once:
                raise ChallengeRefused(429, f"answer one of your {self.rules.open_at_once} open challenges first")
            attempt = self.store.attempts(kept.number, peer_id, ask.model)
            tasks = await self._tasks(kept, peer_id, ask.model, attempt)
            questions = tuple(ChallengeQuestion(task.service, task.messages) for task in tasks)
            id_, deadline_s = secrets.token_hex(16), now_s + self.rules.answer_s
            challenge = Challenge(id_, kept.number, peer_id, ask, attempt, deadline_s, questions)
            self.store.issue(challenge, data)
        return signed(self._identity, challenge)

    async def verdict(self, data: bytes) -> bytes:
        """Grades signed `Answers`; returns a signed `ChallengeVerdict`. Raises `ChallengeRefused`."""
        peer_id, answers = _read(data, Answers)
        record = self.store.challenge(answers.challenge)
        if record is None or record.peer_id != peer_id or answers.judge != self.peer_id:
            raise ChallengeRefused(404, "you have no such challenge of this judge")
        if record.score is not None:
            raise ChallengeRefused(409, "this challenge is answered")
        if record.deadline_s < self._clock():
            raise ChallengeRefused(409, "the deadline of this challenge is over")
        if record.id in self._grading:  # else the same answers sent often would keep the scorer busy
            raise ChallengeRefused(409, "this challenge is being graded")
        self._grading.add(record.id)
        try:
            graded = await self._grade_answers(record, answers)
            score = pass_at_1(graded)
            self.store.keep_grades(record.id, data, graded, score)
        finally:
            self._grading.remove(record.id)
        return signed(self._identity, ChallengeVerdict(record.id, score, tuple(graded)))

    async def _grade_answers(self, record: Record, answers: Answers) -> list[GradedAnswer]:
        kept = self.store.kept_round(record.sitting)
        assert kept is not None
        async with self._turn:
            tasks = await self._tasks(kept, record.peer_id, record.model, record.attempt)
        if len(answers.texts) != len(tasks):
            raise ChallengeRefused(400, f"answers: expected {len(tasks)}, got {len(answers.texts)}")
        return await grade(self._scorer, tasks, answers.texts)

    def transcripts(self, round_: int) -> list[str]:
        """Ids of the challenges of a finished round. Raises `ChallengeRefused`."""
        kept = self.store.kept_round(round_)
        if kept is None or kept.reveals_s >= self._clock():
            raise ChallengeRefused(404, "there is no such round, or it is not over")
        return [record.id for record in self.store.challenges(round_)]

    def transcript(self, id_: str) -> Transcript:
        """Messages and grades of a challenge of a finished round. Raises `ChallengeRefused`."""
        record: Record | None = self.store.challenge(id_)
        kept = self.store.kept_round(record.sitting) if record else None
        if record is None or kept is None or kept.reveals_s >= self._clock():
            raise ChallengeRefused(404, "there is no such challenge, or its round is not over")
        return Transcript(record.sitting, record.attempt, record.ask, record.answers, self.store.graded_answers(id_))

    def _admit(self, peer_id: str) -> None:
        """Raises `ChallengeRefused` for a peer that asks too often."""
        bucket = self._peers.setdefault(peer_id, Bucket(1 / self.rules.peer_every_s, self.rules.peer_burst))
        self._peers.move_to_end(peer_id)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        if not bucket.take(self._steady()):
            raise ChallengeRefused(429, f"one challenge every {self.rules.peer_every_s:g} s, please")
        if not self.store.has_answered(peer_id) and not self._newcomers.take(self._steady()):
            raise ChallengeRefused(429, "too many newcomers ask; try again in a minute")

    def _current(self) -> KeptRound:
        """Returns the current round; commits to it and to the next round if need be."""
        now_s = self._clock()
        newest = self.store.newest_rounds(2)
        while not newest or newest[0].opens_s <= now_s:
            opens_s = max(newest[0].closes_s, now_s) if newest else now_s
            newest.insert(0, self._commit(newest[0].number + 1 if newest else 0, opens_s))
        return next(one for one in newest if one.opens_s <= now_s)

    def _commit(self, number: int, opens_s: float) -> KeptRound:
        seed = secrets.token_bytes(SEED_BYTES)
        closes_s = opens_s + self.rules.round_s
        reveals_s = closes_s + self.rules.answer_s
        round_ = Round(number, opens_s, closes_s, reveals_s, commitment_of(seed), self.rules.each, self._specialties)
        kept = KeptRound(number, opens_s, closes_s, reveals_s, seed, signed(self._identity, round_))
        self.store.put_round(kept)
        return kept

    async def _tasks(self, kept: KeptRound, peer_id: str, model: str, attempt: int) -> list[Task]:
        _, round_ = opened(kept.statement, Round)
        try:
            return await asyncio.to_thread(draw_questions, self._drawer, round_, kept.seed, peer_id, model, attempt)
        except TaskError as error:
            raise ChallengeRefused(503, f"a question could not be drawn: {error}") from error


def draw_questions(
    drawer: ProceduralClient, round_: Round, seed: bytes, peer_id: str, model: str, attempt: int
) -> list[Task]:
    """Draws the questions of a challenge from the round and its seed. Blocks. Raises `TaskError`."""
    return [
        drawer.draw(
            Spec(one.dataset, one.config, one.system_prompt, one.rewrite),
            Split.EVAL,
            0,
            question_index(seed, peer_id, model, attempt, one.dataset, position),
        )
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


def pass_at_1(graded: Sequence[GradedAnswer]) -> float:
    """Share of the questions that were answered right at the only attempt."""
    return sum(answer.passed for answer in graded) / len(graded)


def _read(data: bytes, type_: type[T]) -> tuple[str, T]:
    try:
        return opened(data, type_)
    except WireError as error:
        raise ChallengeRefused(400, str(error)) from error
