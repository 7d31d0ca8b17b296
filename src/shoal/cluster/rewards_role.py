"""`shoal rewards serve`: a scorer of this host, for runs of others.

A run's checker decides what runs here, so a scorer takes only checkers of a sandbox or a worker process. The user's
functions and judges stay with the run.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from shoal import checker
from shoal.cluster.registry import RewardsRole, run_info
from shoal.config import RewardConfig
from shoal.errors import TaskError
from shoal.net.joining import Answering, hold_lease
from shoal.reward.remote import ScoreReply, ScoreRequest
from shoal.reward.service import RewardService
from shoal.types import Task


async def serve_rewards(url: str, token: str, config: RewardConfig, log: Path, announce: Callable[[str], None]) -> None:
    """Scores until it is cancelled, for one run after another at the same URL. Raises a `ShoalError`."""
    async with RewardService(config, log) as service:

        @asynccontextmanager
        async def scoring(_: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
            yield partial(scored, service)

        await hold_lease(url, token, RewardsRole(), announce, scoring, run_info)


async def scored(service: RewardService, request: bytes) -> bytes:
    """Answer to a request of a run. Raises `ChildDied` when no worker can be started any more."""
    try:
        asked = msgspec.json.decode(request, type=ScoreRequest)
        spec = checker.spec_of(checker.to_json(asked.scorer), "scorer")
    except (TaskError, ValueError, RecursionError) as error:
        return msgspec.json.encode(ScoreReply([], str(error)))
    if not checker.is_confined(spec):
        return msgspec.json.encode(ScoreReply([], "function and judge are not run for others"))
    task = Task("remote", "remote", (), asked.truth, asked.info, asked.receipt)
    return msgspec.json.encode(ScoreReply(await service.score_by(spec, task, asked.answers)))
