"""A taker asks a model behind an OpenAI-compatible URL and hands in its answers; an audit checks a judge."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from shoal import wire
from shoal.errors import EngineUnavailable, JudgeError, TaskError, WireError
from shoal.interfaces import Scorer
from shoal.model.answer import written
from shoal.net.client import ONCE, exchange, words
from shoal.swarm.chat import ChatModel, ModelAt
from shoal.swarm.identity import Identity
from shoal.swarm.judge.commitment import opens
from shoal.swarm.judge.condition import Condition
from shoal.swarm.judge.judging import draw_questions, grade
from shoal.swarm.judge.messages import (
    MOST_ANSWER_CHARACTERS,
    MOST_BYTES,
    Answers,
    Challenge,
    ChallengeRequest,
    ChallengeVerdict,
    PublicLedger,
    Revealed,
    Round,
    Transcript,
    opened,
    signed,
)
from shoal.tasks.procedural_client import ProceduralClient
from shoal.types import Message

JUDGE_TIMEOUT_S = 300.0
TRIES = 3
"""Attempts at a question before it counts as unanswered."""
MOST_LEDGER_BYTES = 16 * 1024 * 1024
ROOM_BESIDES = 8192
"""Bytes of a message beside the texts of its answers."""


async def take(
    judge_url: str,
    model: ModelAt,
    identity: Identity,
    *,
    arm: Condition,
    round_: int,
    judge: str | None = None,
    clock: Callable[[], float] = time.time,
    retry_s: float = 1.0,
) -> tuple[Challenge, ChallengeVerdict, int]:
    """Takes one challenge; returns it with its verdict and the number of unanswered questions, which count as wrong.

    Raises `JudgeError` or `WireError`, also when the judge is not `judge`. Raises an `EngineError` when the model
    refuses a question or answers none. `retry_s` is the first pause before another attempt.
    """
    async with aiohttp.ClientSession() as http, ChatModel(model) as chat:
        rounds, judge_id = statements(await _ledger(http, judge_url), judge)
        ask = ChallengeRequest(judge_id, model.name, arm, round_, clock())
        data = await _exchanged(http, f"{judge_url}/challenge", signed(identity, ask))
        _, challenge = opened(data, Challenge, author=judge_id)
        stated = rounds.get(challenge.sitting)
        if stated is None or not stated.opens_s <= challenge.deadline_s <= stated.reveals_s:
            raise WireError(f"challenge: expected one of a round that was committed to, got {challenge.sitting}")
        found = await asyncio.gather(*(_answer(chat, one.messages, retry_s) for one in challenge.questions))
        texts = ["" if isinstance(one, EngineUnavailable) else one for one in found]
        failures = [one for one in found if isinstance(one, EngineUnavailable)]
        if len(failures) == len(found):
            raise failures[0]
        answers = Answers(judge_id, challenge.id, fitting(texts))
        data = await _exchanged(http, f"{judge_url}/verdict", signed(identity, answers))
        _, verdict = opened(data, ChallengeVerdict, author=judge_id)
        return challenge, verdict, len(failures)


def fitting(texts: Sequence[str]) -> tuple[str, ...]:
    """Cuts texts to the size of a signed message: each loses its end if all are too long together."""
    texts = [text[:MOST_ANSWER_CHARACTERS] for text in texts]
    room = MOST_BYTES - ROOM_BESIDES
    if sum(len(text.encode()) for text in texts) <= room:
        return tuple(texts)
    return tuple(text.encode()[: room // len(texts)].decode(errors="ignore") for text in texts)


def statements(ledger: PublicLedger, judge: str | None) -> tuple[dict[int, Round], str]:
    """Decodes a ledger: its rounds by number, and the one judge that signed them. Raises `WireError`."""
    found = [opened(data, Round, author=judge) for data in ledger.sittings]
    authors = {peer_id for peer_id, _ in found}
    if len(authors) != 1:
        raise WireError(f"ledger: expected one judge's commitments, got {len(authors)}")
    numbered = {round_.number: round_ for _, round_ in found}
    if len(numbered) != len(found):
        raise WireError("ledger: two commitments for one round")
    return numbered, authors.pop()


async def audit(
    judge_url: str, drawer: ProceduralClient, scorer: Scorer, *, judge: str | None = None
) -> tuple[int, list[str]]:
    """Checks a judge's finished rounds; returns the number of challenges checked, and all complaints.

    Seeds are compared with the commitments. Takers' messages are compared with their signatures and with the judge, the
    challenge and the attempt. Questions are drawn and answers graded again. Raises `JudgeError` or `WireError`.
    """
    async with aiohttp.ClientSession() as http:
        ledger = await _ledger(http, judge_url)
        rounds, judge_id = statements(ledger, judge)
        seeds = {one.number: one.seed for _, one in (opened(data, Revealed, author=judge_id) for data in ledger.seeds)}
        wrong, checked = [], 0
        for number, seed in sorted(seeds.items()):
            round_ = rounds.get(number)
            if round_ is None or not opens(seed, round_.commitment):
                wrong.append(f"round {number}: the seed is not the one that was committed to")
                continue
            data = await _exchanged(http, f"{judge_url}/sittings/{number}", most=MOST_LEDGER_BYTES)
            asked: dict[str, _Asked] = {}
            for id_ in wire.decode(data, list[str]):
                found = await _exchanged(http, f"{judge_url}/transcripts/{id_}", most=2 * MOST_BYTES)
                checked += 1
                try:
                    one = _asked(id_, wire.decode(found, Transcript), judge_id)
                    wrong += [f"{id_}: {why}" for why in await _complaints(one, round_, seed, drawer, scorer)]
                except (WireError, TaskError) as error:
                    wrong.append(f"{id_}: {error}")
                else:
                    asked[id_] = replace(one, answers=None)
            wrong += [f"round {number}: {why}" for why in _uncounted(asked.values())]
    return checked, wrong


@dataclass(frozen=True, slots=True)
class _Asked:
    """Transcript whose signed messages name this judge and this challenge."""

    peer_id: str
    ask: ChallengeRequest
    attempt: int
    answers: Answers | None
    passed: tuple[bool, ...]


def _asked(id_: str, transcript: Transcript, judge: str) -> _Asked:
    """Raises `WireError`."""
    peer_id, ask = opened(transcript.ask, ChallengeRequest)
    answers = None if transcript.answers is None else opened(transcript.answers, Answers, author=peer_id)[1]
    if ask.judge != judge or (answers is not None and (answers.judge, answers.challenge) != (judge, id_)):
        raise WireError("the taker said this to another judge, or in another challenge")
    return _Asked(peer_id, ask, transcript.attempt, answers, tuple(answer.passed for answer in transcript.marks))


async def _complaints(
    one: _Asked, round_: Round, seed: bytes, drawer: ProceduralClient, scorer: Scorer
) -> Sequence[str]:
    """Raises `TaskError`."""
    if one.answers is None:
        return []
    tasks = await asyncio.to_thread(draw_questions, drawer, round_, seed, one.peer_id, one.ask.model, one.attempt)
    texts = one.answers.texts
    if len(texts) != len(tasks):
        return [f"expected {len(tasks)} answers, got {len(texts)}"]
    graded = await grade(scorer, tasks, texts)
    right = tuple(answer.passed for answer in graded)
    return [] if one.passed == right else ["other grades than these answers are worth"]


def _uncounted(asked: Iterable[_Asked]) -> list[str]:
    """Complaints of a round's attempts: a judge that skips attempts chooses questions, and a request counted twice
    makes up a challenge."""
    attempts: dict[tuple[str, str], list[int]] = {}
    moments: dict[str, list[float]] = {}
    for one in asked:
        attempts.setdefault((one.peer_id, one.ask.model), []).append(one.attempt)
        moments.setdefault(one.peer_id, []).append(one.ask.sent_s)
    return [
        *(
            f"attempts of {peer_id}, {model}: expected 0 to {len(found) - 1}, got {sorted(found)}"
            for (peer_id, model), found in attempts.items()
            if sorted(found) != list(range(len(found)))
        ),
        *(
            f"{peer_id} asked for fewer challenges than it was given"
            for peer_id, found in moments.items()
            if len(set(found)) < len(found)
        ),
    ]


async def _ledger(http: aiohttp.ClientSession, judge_url: str) -> PublicLedger:
    return wire.decode(await _exchanged(http, f"{judge_url}/ledger", most=MOST_LEDGER_BYTES), PublicLedger)


async def _exchanged(
    http: aiohttp.ClientSession, url: str, message: bytes | None = None, *, most: int = MOST_BYTES
) -> bytes:
    """Requests a URL and returns the body of a 200. Raises `JudgeError` with the judge's message."""
    try:
        status, body = await exchange(
            http,
            "GET" if message is None else "POST",
            url,
            message or b"",
            {"Content-Type": "application/octet-stream"},
            timeout_s=JUDGE_TIMEOUT_S,
            most_bytes=most,
            retry=ONCE,
        )
    except EngineUnavailable as error:
        raise JudgeError(f"judge: {error}") from error
    if status != 200:
        raise JudgeError(f"judge {url}: HTTP {status}: {words(body).strip()}")
    return body


async def _answer(model: ChatModel, messages: Sequence[Message], retry_s: float) -> str | EngineUnavailable:
    """Asks the model; returns its text, or the failure of the last attempt. Raises `RequestRefused`."""
    try:
        return written((await model.ask(messages, TRIES, retry_s)).message.message)
    except EngineUnavailable as error:
        return error
