"""Scorers join a run and answer over their leases."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from shoal.cluster.registry import RewardsRole
from shoal.cluster.rewards_role import scored
from shoal.config import RewardConfig
from shoal.net.joining import Answering, hold_lease
from shoal.net.run_server import RunServer
from shoal.reward.service import RewardService
from shoal.types import Message, Reward, Role, Task

TESTS = [{"call": "add", "args": [1, 2], "returns": 3}]
GOOD = {"scorer": {"name": "exact"}, "answers": ["1"], "truth": "1"}


def task(scorer: str, answer: str | None = None, **info: object) -> Task:
    return Task("t/1", "t", (Message(Role.USER, "?"),), answer, json.dumps({"scorer": scorer, **info}))


def values(rewards: list[Reward]) -> list[float]:
    return [reward.value for reward in rewards]


async def joined(server: RunServer, service: RewardService) -> "asyncio.Task[None]":
    """A scorer of this process, once the run uses it."""
    used = asyncio.Event()

    @asynccontextmanager
    async def work(_: object) -> AsyncIterator[Answering]:
        yield partial(scored, service)

    def announce(sentence: str) -> None:
        if sentence.startswith("joined"):
            used.set()

    lease = asyncio.create_task(hold_lease(server.url, "", RewardsRole(), announce, work))
    async with asyncio.timeout(120):
        await used.wait()
    return lease


def test_scorers_of_others_score_and_one_that_leaves_is_made_up_for() -> None:
    async def main() -> None:
        mine, theirs = RewardConfig(workers=0), RewardConfig(workers=1)
        async with RewardService(mine) as service, RewardService(theirs) as other:
            assert service.remote is not None
            with RunServer() as server:
                server.open(RewardsRole, service.remote.joined)
                first, second = await joined(server, other), await joined(server, other)
                answers = ["def add(a, b): return a + b", "def add(a, b): return 0"]
                assert values(await service.score(task("code", tests=TESTS), answers)) == [1.0, 0.0]
                assert values(await service.score(task("math", "1/2"), ["0.5", "2"])) == [1.0, 0.0]
                groups = [service.score(task("exact", str(n)), [str(n), "x"]) for n in range(8)]
                scoring = asyncio.gather(*groups)
                first.cancel()
                assert [values(rewards) for rewards in await scoring] == [[1.0, 0.0]] * 8
                assert service.pids == []
                second.cancel()
                await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    "forbidden",
    [
        {"name": "function", "path": "os:system"},
        {"name": "judge", "url": "http://x", "model": "m", "rubric": "r"},
        {"name": "code", "timeout_s": -1},
        {"name": "regex", "pattern": "("},
        17,
    ],
)
def test_a_scorer_runs_no_code_of_the_run_and_says_why(forbidden: object) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(workers=1)) as service:
            parts = {"name": "weighted", "parts": [{"scorer": forbidden}]}
            for asked in (b"{", json.dumps({**GOOD, "scorer": parts}).encode()):
                reply = json.loads(await scored(service, asked))
                assert reply["refused"]
                assert reply["rewards"] == []
            assert json.loads(await scored(service, json.dumps(GOOD).encode()))["rewards"][0]["value"] == 1.0

    asyncio.run(main())
