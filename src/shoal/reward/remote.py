"""Client side of `shoal rewards serve`: the JSON messages, and a scorer that asks other machines."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shoal.checker import Spec
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.net.client import ONCE, Client
from shoal.types import Receipt, Reward, RewardStatus, Task

MOST_BODY_BYTES = 64 << 20
MOST_ANSWERS = 4096
MOST_EVIDENCE = 1 << 20
RETRIES = 4
RETRY_DELAY_S = 0.25
TIMEOUT_S = 600.0
"""Seconds of one request, with its wait at the server; bounds the cost of a silent machine."""
REST_S = 5.0
"""Seconds for which a server that did not answer goes last in the order."""


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /score: answers to one task, and the checker that scores them."""

    scorer: Spec
    answers: list[str]
    truth: str | None = None
    info: str = "{}"
    receipt: Receipt | None = None


class ScoreReply(msgspec.Struct, frozen=True):
    """One reward per answer, in order."""

    rewards: list[Reward]


@dataclass(slots=True)
class _Server:
    client: Client
    running: int = 0
    rests_until_s: float = 0.0


class RemoteScorer:
    """Asks the server with the least load, and another server when that one cannot score now."""

    def __init__(self, urls: Sequence[str], token: str = "") -> None:
        self._servers: dict[str, _Server] = {}
        self._some = asyncio.Event()
        for url in urls:
            self.add(url, url, token)

    def add(self, name: str, url: str, token: str) -> None:
        """Asks one more server."""
        # another server is asked instead of the same one again
        self._servers[name] = _Server(Client(url, token=token, timeout_s=TIMEOUT_S, retry=ONCE))
        self._some.set()

    async def remove(self, name: str) -> None:
        """Asks a server no more; its requests under way are asked elsewhere."""
        server = self._servers.pop(name)
        if not self._servers:
            self._some.clear()
        await server.client.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        for server in self._servers.values():
            await server.client.aclose()

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. The rewards fail when no server answers after all retries."""
        request = ScoreRequest(spec, list(answers), task.answer, task.info, task.receipt)
        why = ""
        for attempt in range(RETRIES + 1):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._some.wait()
            except TimeoutError:
                why = f"no scorer has joined the run for {TIMEOUT_S:g} s"
                break
            server = min(self._servers.values(), key=lambda one: (self._rests(one), one.running, one.rests_until_s))
            server.running += 1
            try:
                rewards = (await server.client.ask("POST", "/score", ScoreReply, request)).rewards
                wrong = _wrong(rewards, len(answers))
                if not wrong and not _all_failed(rewards):
                    return rewards
                why = f"{server.client.url}: {wrong or rewards[0].evidence or 'it scores nothing'}"
            except RequestRefused as error:
                why = f"{server.client.url}{error}"
                break
            except EngineUnavailable as error:
                why = f"{server.client.url}: {error}"
            finally:
                server.running -= 1
            server.rests_until_s = asyncio.get_running_loop().time() + REST_S
            if all(map(self._rests, self._servers.values())) and attempt < RETRIES:
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        return [Reward(0.0, RewardStatus.FAILED, evidence=why)] * len(answers)

    def _rests(self, server: _Server) -> bool:
        return server.rests_until_s > asyncio.get_running_loop().time()


def _all_failed(rewards: Sequence[Reward]) -> bool:
    """Whether a server failed to score every answer; another server may succeed."""
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
