"""A client of `shoal rewards serve`: scores on other machines."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from shoal.checker import Spec
from shoal.errors import EngineUnavailable
from shoal.net.client import ONCE, authorization, exchange, session, words
from shoal.reward.http import ScoreReply, ScoreRequest
from shoal.types import Reward, RewardStatus, Task

RETRIES = 4
RETRY_DELAY_S = 0.25
TIMEOUT_S = 600.0
"""Seconds of one request, with its wait at the server; bounds the cost of a silent machine."""
REST_S = 5.0
"""Seconds for which a server that did not answer is asked last."""


@dataclass(slots=True)
class _Server:
    url: str
    running: int = 0
    rests_until_s: float = 0.0


class RemoteScorer:
    """Asks the server with the least load, and another server when that one cannot score now."""

    def __init__(self, urls: Sequence[str], token: str = "") -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._headers = authorization(token)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. The rewards fail when no server answers after all retries."""
        body = msgspec.json.encode(ScoreRequest(spec, list(answers), task.answer, task.info, task.receipt))
        why = ""
        for attempt in range(RETRIES + 1):
            server = self._least_loaded()
            try:
                status, reply = await self._post(server, body)
                if status == 200:
                    return _rewards(reply, len(answers))
            except EngineUnavailable as error:
                why = str(error)
            except (msgspec.MsgspecError, ValueError) as error:
                why = f"{server.url}: {type(error).__name__}: {error}"
            else:
                why = f"{server.url}: HTTP {status}: {words(reply)}"
                if status < 500 and status != 429:
                    break
            server.rests_until_s = asyncio.get_running_loop().time() + REST_S
            if all(self._rests(one) for one in self._servers) and attempt < RETRIES:
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        return [Reward(0.0, RewardStatus.FAILED, evidence=why)] * len(answers)

    def _rests(self, server: _Server) -> bool:
        return server.rests_until_s > asyncio.get_running_loop().time()

    def _least_loaded(self) -> _Server:
        return min(self._servers, key=lambda server: (self._rests(server), server.running, server.rests_until_s))

    async def _post(self, server: _Server, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            self._session = session()
        server.running += 1
        try:
            url = f"{server.url}/score"  # another server is asked instead of the same one again
            return await exchange(self._session, "POST", url, body, self._headers, timeout_s=TIMEOUT_S, retry=ONCE)
        finally:
            server.running -= 1


def _rewards(reply: bytes, n: int) -> list[Reward]:
    """The rewards of a reply. Raises `ValueError` and msgspec's errors for a body that is no reply to `n` answers."""
    rewards = [one.reward for one in msgspec.json.decode(reply, type=ScoreReply).rewards]
    if len(rewards) != n:
        raise ValueError(f"expected {n} rewards, got {len(rewards)}")
    return rewards
