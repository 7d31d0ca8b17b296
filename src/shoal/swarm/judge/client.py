"""A taker asks a model behind an OpenAI-compatible URL and hands in its answers."""

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from shoal import wire
from shoal.errors import EngineError, EngineUnavailable, JudgeError, WireError
from shoal.model.answer import written
from shoal.net.client import Retry, exchange, words
from shoal.net.identity import Identity
from shoal.swarm.generator import ChatModel
from shoal.swarm.judge.messages import (
    MOST_ANSWER_CHARACTERS,
    MOST_BYTES,
    Answers,
    Challenge,
    ChallengeRequest,
    ChallengeVerdict,
    Condition,
    PublicLedger,
    Round,
    opened,
    signed,
)
from shoal.types import Message

JUDGE_TIMEOUT_S = 300.0
TRIES = 3
"""Attempts at a question before it counts as unanswered."""
MOST_LEDGER_BYTES = 16 * 1024 * 1024
AGAIN = Retry(tries=3, pause_s=1.0, statuses=lambda status: status == 503)
"""A judge whose scorer failed takes the same message again."""
ROOM_BESIDES = 8192
"""Bytes of a message in addition to its answers' texts."""


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
        if not challenge.questions:
            raise WireError("challenge: expected questions, got none")
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


async def _ledger(http: aiohttp.ClientSession, judge_url: str) -> PublicLedger:
    return wire.decode(await _exchanged(http, f"{judge_url}/ledger", most=MOST_LEDGER_BYTES), PublicLedger)


async def _exchanged(http: aiohttp.ClientSession, url: str, message: bytes = b"", *, most: int = MOST_BYTES) -> bytes:
    """Requests a URL and returns the body of a 200. Raises `JudgeError` with the judge's message."""
    method, headers = "POST" if message else "GET", {"Content-Type": "application/octet-stream"}
    try:
        status, body = await exchange(
            http, method, url, message, headers, timeout_s=JUDGE_TIMEOUT_S, most_bytes=most, retry=AGAIN
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
