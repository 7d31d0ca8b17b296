"""A taker: gets a challenge, asks a model behind an OpenAI-compatible URL, hands in the answers; and audits a judge."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from shoal import wire
from shoal.errors import EngineUnavailable, JudgeError, TaskError, WireError
from shoal.interfaces import Scorer
from shoal.model.answer import written
from shoal.net.client import ONCE, exchanged, words
from shoal.swarm.chat import ChatModel, ModelAt
from shoal.swarm.identity import Identity
from shoal.swarm.judge.commitment import opens
from shoal.swarm.judge.condition import Condition
from shoal.swarm.judge.judging import drawn, grade
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
"""Of a question whose answer failed to come; then it counts as unanswered."""
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
    """Has a model judged once; gives how many questions it did not answer, which count as wrong.

    Raises `JudgeError` or `WireError`, also when the judge is not `judge`, and an `EngineError` when the model refuses
    a question or answers none; the first pause before it is asked again is `retry_s`.
    """
    async with aiohttp.ClientSession() as http, ChatModel(model) as chat:
        sittings, judge_id = statements(await _ledger(http, judge_url), judge)
        ask = ChallengeRequest(judge_id, model.name, arm, round_, clock())
        data = await _exchanged(http, f"{judge_url}/challenge", signed(identity, ask))
        _, challenge = opened(data, Challenge, author=judge_id)
        sitting = sittings.get(challenge.sitting)
        if sitting is None or not sitting.opens_s <= challenge.deadline_s <= sitting.reveals_s:
            raise WireError(f"challenge: expected one of a sitting that was committed to, got {challenge.sitting}")
        said = await asyncio.gather(*(_answer(chat, one.messages, retry_s) for one in challenge.questions))
        texts = ["" if isinstance(one, EngineUnavailable) else one for one in said]
        failures = [one for one in said if isinstance(one, EngineUnavailable)]
        if len(failures) == len(said):
            raise failures[0]
        answers = Answers(judge_id, challenge.id, fitting(texts))
        data = await _exchanged(http, f"{judge_url}/verdict", signed(identity, answers))
        _, verdict = opened(data, ChallengeVerdict, author=judge_id)
        return challenge, verdict, len(failures)


def fitting(texts: Sequence[str]) -> tuple[str, ...]:
    """What of some texts a signed message holds: the first part of each, if all are too long together."""
    texts = [text[:MOST_ANSWER_CHARACTERS] for text in texts]
    room = MOST_BYTES - ROOM_BESIDES
    if sum(len(text.encode()) for text in texts) <= room:
        return tuple(texts)
    return tuple(text.encode()[: room // len(texts)].decode(errors="ignore") for text in texts)


def statements(ledger: PublicLedger, judge: str | None) -> tuple[dict[int, Round], str]:
    """The sittings of a ledger by number, and the one judge that signed them. Raises `WireError`."""
    found = [opened(data, Round, author=judge) for data in ledger.sittings]
    authors = {peer_id for peer_id, _ in found}
    if len(authors) != 1:
        raise WireError(f"ledger: expected one judge's commitments, got {len(authors)}")
    numbered = {sitting.number: sitting for _, sitting in found}
    if len(numbered) != len(found):
        raise WireError("ledger: two commitments for one sitting")
    return numbered, authors.pop()


async def audit(
    judge_url: str, drawer: ProceduralClient, scorer: Scorer, *, judge: str | None = None
) -> tuple[int, list[str]]:
    """How many challenges of sittings that are over were checked, and everything that is wrong with them.

    Seeds are held against the commitments, the takers' words against their signatures and against the judge, the
    challenge and the attempt that they stand for, and questions and marks are made again. Raises `JudgeError` or
    `WireError`.
    """
    async with aiohttp.ClientSession() as http:
        ledger = await _ledger(http, judge_url)
        sittings, judge_id = statements(ledger, judge)
        seeds = {one.number: one.seed for _, one in (opened(data, Revealed, author=judge_id) for data in ledger.seeds)}
        wrong, checked = [], 0
        for number, seed in sorted(seeds.items()):
            sitting = sittings.get(number)
            if sitting is None or not opens(seed, sitting.commitment):
                wrong.append(f"sitting {number}: the seed is not the one that was committed to")
                continue
            data = await _exchanged(http, f"{judge_url}/sittings/{number}", most=MOST_LEDGER_BYTES)
            asked: dict[str, _Asked] = {}
            for id_ in wire.decode(data, list[str]):
                found = await _exchanged(http, f"{judge_url}/transcripts/{id_}", most=2 * MOST_BYTES)
                checked += 1
                try:
                    one = _asked(id_, wire.decode(found, Transcript), judge_id)
                    wrong += [f"{id_}: {why}" for why in await _complaints(one, sitting, seed, drawer, scorer)]
                except (WireError, TaskError) as error:
                    wrong.append(f"{id_}: {error}")
                else:
                    asked[id_] = replace(one, answers=None)
            wrong += [f"sitting {number}: {why}" for why in _uncounted(asked.values())]
    return checked, wrong


@dataclass(frozen=True, slots=True)
class _Asked:
    """A transcript whose signed words are of this judge and this challenge."""

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
    return _Asked(peer_id, ask, transcript.attempt, answers, tuple(mark.passed for mark in transcript.marks))


async def _complaints(
    one: _Asked, sitting: Round, seed: bytes, drawer: ProceduralClient, scorer: Scorer
) -> Sequence[str]:
    """Raises `TaskError`."""
    if one.answers is None:
        return []
    tasks = await asyncio.to_thread(drawn, drawer, sitting, seed, one.peer_id, one.ask.model, one.attempt)
    texts = one.answers.texts
    if len(texts) != len(tasks):
        return [f"expected {len(tasks)} answers, got {len(texts)}"]
    marks = await grade(scorer, tasks, texts)
    right = tuple(mark.passed for mark in marks)
    return [] if one.passed == right else ["other marks than these answers are worth"]


def _uncounted(sitting: Iterable[_Asked]) -> list[str]:
    """A judge that skips attempts chooses questions; one that counts a request twice makes up challenges."""
    attempts: dict[tuple[str, str], list[int]] = {}
    moments: dict[str, list[float]] = {}
    for one in sitting:
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
    """The body of a 200. Raises `JudgeError`, with the judge's sentence."""
    try:
        status, body = await exchanged(
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
    """The model's words, or why it has none after some tries. Raises `RequestRefused`."""
    try:
        return written((await model.ask(messages, TRIES, retry_s)).message.message)
    except EngineUnavailable as error:
        return error
