"""A taker asks a model behind an OpenAI-compatible URL and hands in its answers; an audit checks a judge."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import aiohttp

from shoal import wire
from shoal.errors import EngineError, EngineUnavailable, JudgeError, TaskError, WireError
from shoal.interfaces import Scorer
from shoal.model.answer import written
from shoal.net.client import ONCE, exchange, words
from shoal.net.identity import Identity
from shoal.swarm.answerers import ChatModel
from shoal.swarm.judge.judging import draw_questions, grade
from shoal.swarm.judge.messages import (
    MOST_ANSWER_CHARACTERS,
    MOST_BYTES,
    Answers,
    Challenge,
    ChallengeRequest,
    ChallengeVerdict,
    Condition,
    PublicLedger,
    Revealed,
    Round,
    Transcript,
    commitment_of,
    opened,
    signed,
)
from shoal.tasks.procedural_client import ProceduralClient
from shoal.types import Message, Task

JUDGE_TIMEOUT_S = 300.0
TRIES = 3
"""Attempts at a question before it counts as unanswered."""
MOST_LEDGER_BYTES = 16 * 1024 * 1024
ROOM_BESIDES = 8192
"""Bytes of a message beside the texts of its answers."""


async def take(
    judge_url: str,
    model: ChatModel,
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
    answers no question. `retry_s` is the first pause before another attempt.
    """
    async with aiohttp.ClientSession() as http, model:
        rounds, judge_id = statements(await _ledger(http, judge_url), judge)
        ask = ChallengeRequest(judge_id, model.name, arm, round_, clock())
        data = await _exchanged(http, f"{judge_url}/challenge", signed(identity, ask))
        _, challenge = opened(data, Challenge, author=judge_id)
        stated = rounds.get(challenge.sitting)
        if stated is None or not stated.opens_s <= challenge.deadline_s <= stated.reveals_s:
            raise WireError(f"challenge: expected one of a round that was committed to, got {challenge.sitting}")
        found = await asyncio.gather(*(_answer(model, one.messages, retry_s) for one in challenge.questions))
        failures = [one for one in found if isinstance(one, EngineError)]
        if len(failures) == len(found):
            raise failures[0]
        texts = fitting(["" if isinstance(one, EngineError) else one for one in found])
        data = await _exchanged(http, f"{judge_url}/verdict", signed(identity, Answers(judge_id, challenge.id, texts)))
        return challenge, opened(data, ChallengeVerdict, author=judge_id)[1], len(failures)


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
    wrong, checked = list[str](), 0
    async with aiohttp.ClientSession() as http:
        ledger = await _ledger(http, judge_url)
        rounds, judge_id = statements(ledger, judge)
        revealed = [opened(data, Revealed, author=judge_id)[1] for data in ledger.seeds]
        for number, seed in sorted((one.number, one.seed) for one in revealed):
            round_ = rounds.get(number)
            if round_ is None or commitment_of(seed) != round_.commitment:
                wrong.append(f"round {number}: the seed is not the one that was committed to")
                continue
            attempts, moments = defaultdict[tuple[str, str], list[int]](list), Counter[tuple[str, float]]()
            for position in itertools.count():
                data = await _exchanged(http, f"{judge_url}/sittings/{number}/{position}", most=2 * MOST_BYTES)
                found = wire.decode(data, list[Transcript])
                if not found:
                    break
                checked += 1
                try:
                    peer_id, ask, answers = _said(found[0], judge_id)
                    attempts[peer_id, ask.model].append(found[0].attempt)
                    moments[peer_id, ask.sent_s] += 1
                    if answers is not None:
                        of = (peer_id, ask.model, found[0].attempt)
                        tasks = await asyncio.to_thread(draw_questions, drawer, round_, seed, *of)
                        await _check(tasks, answers.texts, found[0], scorer)
                except (WireError, TaskError) as error:
                    wrong.append(f"{found[0].challenge}: {error}")
            wrong += [f"round {number}: {why}" for why in _miscounted(attempts, moments)]
    return checked, wrong


def _said(one: Transcript, judge: str) -> tuple[str, ChallengeRequest, Answers | None]:
    """Decodes a challenge's taker, request and answers. Raises `WireError` unless they are for this judge."""
    peer_id, ask = opened(one.ask, ChallengeRequest)
    answers = None if one.answers is None else opened(one.answers, Answers, author=peer_id)[1]
    if ask.judge != judge or (answers is not None and (answers.judge, answers.challenge) != (judge, one.challenge)):
        raise WireError("the taker said this to another judge, or in another challenge")
    return peer_id, ask, answers


async def _check(tasks: Sequence[Task], texts: Sequence[str], one: Transcript, scorer: Scorer) -> None:
    """Raises `WireError` for grades that the answers do not have."""
    if len(texts) != len(tasks):
        raise WireError(f"expected {len(tasks)} answers, got {len(texts)}")
    graded = await grade(scorer, tasks, texts)
    if [answer.passed for answer in graded] != [answer.passed for answer in one.marks]:
        raise WireError("other grades than these answers are worth")


def _miscounted(attempts: dict[tuple[str, str], list[int]], moments: Counter[tuple[str, float]]) -> list[str]:
    """Complaints of a round's attempts: a judge that skips attempts chooses questions, and a request counted twice
    makes up a challenge."""
    gaps = [
        f"attempts of {peer_id}, {model}: expected 0 to {len(found) - 1}, got {sorted(found)}"
        for (peer_id, model), found in attempts.items()
        if sorted(found) != list(range(len(found)))
    ]
    twice = sorted({peer_id for (peer_id, _), count in moments.items() if count > 1})
    return gaps + [f"{peer_id} asked for fewer challenges than it was given" for peer_id in twice]


async def _ledger(http: aiohttp.ClientSession, judge_url: str) -> PublicLedger:
    return wire.decode(await _exchanged(http, f"{judge_url}/ledger", most=MOST_LEDGER_BYTES), PublicLedger)


async def _exchanged(http: aiohttp.ClientSession, url: str, message: bytes = b"", *, most: int = MOST_BYTES) -> bytes:
    """Requests a URL and returns the body of a 200. Raises `JudgeError` with the judge's message."""
    method, headers = "POST" if message else "GET", {"Content-Type": "application/octet-stream"}
    try:
        status, body = await exchange(
            http, method, url, message, headers, timeout_s=JUDGE_TIMEOUT_S, most_bytes=most, retry=ONCE
        )
    except EngineUnavailable as error:
        raise JudgeError(f"judge: {error}") from error
    if status != 200:
        raise JudgeError(f"judge {url}: HTTP {status}: {words(body).strip()}")
    return body


async def _answer(model: ChatModel, messages: Sequence[Message], retry_s: float) -> str | EngineError:
    """Asks the model; returns its text, or a refusal, or the failure of the last attempt."""
    try:
        return written((await model.ask(messages, TRIES, retry_s)).message.message)
    except EngineError as error:  # a question that is too long for the model leaves the others to it
        return error
