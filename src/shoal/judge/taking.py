"""A taker: gets a challenge, asks a model behind an OpenAI-compatible URL, hands in the answers; and audits a judge."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from shoal import wire
from shoal.errors import JudgeError, TaskError, WireError
from shoal.interfaces import Scorer
from shoal.judge.arm import Arm
from shoal.judge.commitment import opens
from shoal.judge.judging import drawn, marked
from shoal.judge.messages import (
    MOST_ANSWER_CHARACTERS,
    MOST_BYTES,
    Answers,
    Ask,
    Challenge,
    Ledger,
    Revealed,
    Sitting,
    Transcript,
    Verdict,
    opened,
    signed,
)
from shoal.swarm.identity import Identity
from shoal.tasks.drawer import Drawer
from shoal.types import Message

AT_ONCE = 8
"""Questions that the model answers at the same time."""
MODEL_TIMEOUT_S = 120.0
JUDGE_TIMEOUT_S = 300.0
TRIES = 3
"""Of a question whose answer failed to come; then it counts as unanswered."""
RETRY_S = 1.0
MOST_LEDGER_BYTES = 16 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelAt:
    """A model behind a URL that speaks OpenAI's chat completions."""

    url: str
    """Up to and including /v1."""
    name: str
    key: str = ""
    max_tokens: int = 1024
    temperature: float | None = None
    """The server's own when unset."""


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said


class _Body(msgspec.Struct):
    choices: list[_Choice]


async def take(
    judge_url: str,
    model: ModelAt,
    identity: Identity,
    *,
    arm: Arm,
    round_: int,
    judge: str | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[Challenge, Verdict]:
    """Has a model judged once. Raises `JudgeError` or `WireError`, also when the judge is not `judge`."""
    async with aiohttp.ClientSession() as http:
        sittings, judge_id = statements(await _ledger(http, judge_url), judge)
        ask = Ask(judge_id, model.name, arm, round_, clock())
        data = await _exchanged(http, f"{judge_url}/challenge", signed(identity, ask))
        _, challenge = opened(data, Challenge, author=judge_id)
        sitting = sittings.get(challenge.sitting)
        if sitting is None or not sitting.opens_s <= challenge.deadline_s <= sitting.reveals_s:
            raise WireError(f"challenge: expected one of a sitting that was committed to, got {challenge.sitting}")
        turn = asyncio.Semaphore(AT_ONCE)
        texts = await asyncio.gather(*(_answer(http, turn, model, one.messages) for one in challenge.questions))
        answers = Answers(judge_id, challenge.id, tuple(text[:MOST_ANSWER_CHARACTERS] for text in texts))
        data = await _exchanged(http, f"{judge_url}/verdict", signed(identity, answers))
        _, verdict = opened(data, Verdict, author=judge_id)
        return challenge, verdict


def statements(ledger: Ledger, judge: str | None) -> tuple[dict[int, Sitting], str]:
    """The sittings of a ledger by number, and the one judge that signed them. Raises `WireError`."""
    found = [opened(data, Sitting, author=judge) for data in ledger.sittings]
    authors = {peer_id for peer_id, _ in found}
    if len(authors) != 1:
        raise WireError(f"ledger: expected one judge's commitments, got {len(authors)}")
    return {sitting.number: sitting for _, sitting in found}, authors.pop()


async def audited(judge_url: str, drawer: Drawer, scorer: Scorer, *, judge: str | None = None) -> tuple[int, list[str]]:
    """How many challenges of sittings that are over were checked, and everything that is wrong with them.

    Seeds are held against the commitments, the takers' words against their signatures, and questions and marks are made
    again. Raises `JudgeError` or `WireError`.
    """
    async with aiohttp.ClientSession() as http:
        ledger = await _ledger(http, judge_url)
        sittings, judge_id = statements(ledger, judge)
        seeds = {one.number: one.seed for _, one in (opened(data, Revealed, author=judge_id) for data in ledger.seeds)}
        wrong, checked = [], 0
        for number, seed in sorted(seeds.items()):
            sitting = sittings[number]
            if not opens(seed, sitting.commitment):
                wrong.append(f"sitting {number}: the seed is not the one that was committed to")
                continue
            data = await _exchanged(http, f"{judge_url}/sittings/{number}", most=MOST_LEDGER_BYTES)
            for id_ in wire.decode(data, list[str]):
                found = await _exchanged(http, f"{judge_url}/transcripts/{id_}", most=2 * MOST_BYTES)
                transcript = wire.decode(found, Transcript)
                wrong += [f"{id_}: {why}" for why in await _complaints(transcript, sitting, seed, drawer, scorer)]
                checked += 1
    return checked, wrong


async def _complaints(
    transcript: Transcript, sitting: Sitting, seed: bytes, drawer: Drawer, scorer: Scorer
) -> Sequence[str]:
    try:
        peer_id, ask = opened(transcript.ask, Ask)
        if transcript.answers is None:
            return []
        _, answers = opened(transcript.answers, Answers, author=peer_id)
        arguments = (drawer, sitting, seed, peer_id, ask.model, transcript.attempt)
        tasks = await asyncio.to_thread(drawn, *arguments)
    except (WireError, TaskError) as error:
        return [str(error)]
    if len(answers.texts) != len(tasks):
        return [f"expected {len(tasks)} answers, got {len(answers.texts)}"]
    marks = await marked(scorer, tasks, answers.texts)
    given = [mark.passed for mark in transcript.marks]
    return [] if given == [mark.passed for mark in marks] else ["other marks than these answers are worth"]


async def _ledger(http: aiohttp.ClientSession, judge_url: str) -> Ledger:
    return wire.decode(await _exchanged(http, f"{judge_url}/ledger", most=MOST_LEDGER_BYTES), Ledger)


async def _exchanged(
    http: aiohttp.ClientSession, url: str, message: bytes | None = None, *, most: int = MOST_BYTES
) -> bytes:
    """The body of a 200. Raises `JudgeError`, with the judge's sentence."""
    limit = aiohttp.ClientTimeout(total=JUDGE_TIMEOUT_S)
    try:
        async with http.request("GET" if message is None else "POST", url, data=message, timeout=limit) as reply:
            body = await reply.content.read(most + 1) if reply.status != 200 else await _read(reply, most)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise JudgeError(f"judge {url}: {error or type(error).__name__}") from error
    if reply.status != 200:
        raise JudgeError(f"judge {url}: HTTP {reply.status}: {body[:300].decode(errors='replace').strip()}")
    return body


async def _read(reply: aiohttp.ClientResponse, most: int) -> bytes:
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > most:
            raise JudgeError(f"judge: expected at most {most} bytes, got more")
    return bytes(body)


async def _answer(
    http: aiohttp.ClientSession, turn: asyncio.Semaphore, model: ModelAt, messages: Sequence[Message]
) -> str:
    """The model's words; none when it does not answer. Raises `JudgeError` when it refuses to."""
    request: dict[str, object] = {
        "model": model.name,
        "messages": [{"role": message.role.value, "content": message.content} for message in messages],
        "max_tokens": model.max_tokens,
    }
    if model.temperature is not None:
        request["temperature"] = model.temperature
    headers = {"Authorization": f"Bearer {model.key}"} if model.key else {}
    url, limit = f"{model.url.rstrip('/')}/chat/completions", aiohttp.ClientTimeout(total=MODEL_TIMEOUT_S)
    async with turn:
        for attempt in range(TRIES):
            try:
                async with http.post(url, json=request, headers=headers, timeout=limit) as reply:
                    body = await _read(reply, MOST_LEDGER_BYTES)
                    if reply.status in (400, 401, 403, 404):
                        raise JudgeError(f"model {url}: HTTP {reply.status}: {body[:300].decode(errors='replace')}")
                    if reply.status == 200:
                        return msgspec.json.decode(body, type=_Body).choices[0].message.content or ""
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, IndexError):
                pass
            await asyncio.sleep(RETRY_S * 2**attempt)
    return ""
