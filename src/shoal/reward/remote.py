"""Scorers of other hosts, as the run sees them; `cluster.rewards_role` is the other side.

A scorer connects to the run and answers requests over that connection, its lease, as JSON.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from shoal.checker import Spec
from shoal.errors import EngineUnavailable, WorkerLost
from shoal.net.client import decoded
from shoal.net.joining import RunRole
from shoal.net.run_server import LeasedWorker
from shoal.types import Receipt, Reward, RewardStatus, Task

MOST_EVIDENCE = 1 << 20
RETRIES = 4
RETRY_DELAY_S = 0.25
TIMEOUT_S = 600.0
"""Seconds of one request, with its wait at the scorer; bounds the cost of a silent machine."""
REST_S = 5.0
"""Seconds for which a scorer that did not answer goes last in the order."""


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers to one task, and the checker that scores them."""

    scorer: Spec
    answers: list[str]
    truth: str | None = None
    info: str = "{}"
    receipt: Receipt | None = None


class ScoreReply(msgspec.Struct, frozen=True):
    """One reward per answer, in order, or why the scorer takes no such request."""

    rewards: list[Reward]
    refused: str = ""


@dataclass(slots=True)
class _Scorer:
    worker: LeasedWorker
    rests_until_s: float = 0.0


class RemoteScorer:
    """Asks the scorer with the least load, and another one when that one cannot score now."""

    def __init__(self) -> None:
        self._scorers: dict[str, _Scorer] = {}
        self._some = asyncio.Event()

    @asynccontextmanager
    async def joined(self, _: RunRole, worker: LeasedWorker) -> AsyncIterator[None]:
        """Asks a scorer within the block."""
        self._scorers[worker.name] = _Scorer(worker)
        self._some.set()
        try:
            yield
        finally:
            del self._scorers[worker.name]
            if not self._scorers:
                self._some.clear()

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. The rewards fail when no scorer answers after all retries."""
        request = msgspec.json.encode(ScoreRequest(spec, list(answers), task.answer, task.info, task.receipt))
        why = ""
        for attempt in range(RETRIES + 1):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    while not self._scorers:  # one that has come may have left again
                        await self._some.wait()
            except TimeoutError:
                why = f"no scorer has joined the run for {TIMEOUT_S:g} s"
                break
            scorer = min(
                self._scorers.values(), key=lambda one: (self._rests(one), one.worker.running, one.rests_until_s)
            )
            name = scorer.worker.name
            try:
                reply = decoded(await scorer.worker.call(request, TIMEOUT_S), ScoreReply, name)
                if reply.refused:
                    why = f"{name}: {reply.refused}"
                    break
                wrong = _wrong(reply.rewards, len(answers))
                if not wrong and not _all_failed(reply.rewards):
                    return reply.rewards
                why = f"{name}: {wrong or reply.rewards[0].evidence or 'it scores nothing'}"
            except (WorkerLost, EngineUnavailable) as error:
                why = str(error)
            except TimeoutError:
                why = f"{name} gave no rewards within {TIMEOUT_S:g} s"
            scorer.rests_until_s = asyncio.get_running_loop().time() + REST_S
            if all(map(self._rests, self._scorers.values())) and attempt < RETRIES:
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        return [Reward(0.0, RewardStatus.FAILED, evidence=why)] * len(answers)

    def _rests(self, scorer: _Scorer) -> bool:
        return scorer.rests_until_s > asyncio.get_running_loop().time()


def _all_failed(rewards: Sequence[Reward]) -> bool:
    """Whether a scorer failed to score every answer; another one may succeed."""
    return bool(rewards) and all(one.status is RewardStatus.FAILED for one in rewards)


def _wrong(rewards: Sequence[Reward], count: int) -> str:
    """The first wrong field of a reply, with the expected and the received value; empty for a valid reply."""
    if len(rewards) != count:
        return f"expected {count} rewards, got {len(rewards)}"
    for one in rewards:
        if one.status is not RewardStatus.SCORED and one.value:
            return f"value: expected 0 with status {one.status}, got {one.value}"
        numbers = [value for _, value in one.parts]
        if not all(map(math.isfinite, numbers)):
            return f"parts: expected finite numbers, got {numbers}"
        if len(one.evidence) > MOST_EVIDENCE:
            return f"evidence: expected at most {MOST_EVIDENCE} characters, got {len(one.evidence)}"
    return ""
