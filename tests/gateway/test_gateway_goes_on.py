"""A session that goes on from logged turns gets an answer only to a request that asks the same of the engine."""

from typing import Any

import openai
import pytest

from gateway_engine import Served, served
from shoal.experience.log import memory_log
from shoal.experience.schema import RunMeta
from shoal.experience.turns import GroupTurns, read_left
from shoal.gateway.sessions import OpenRequest
from shoal.types import Message, Role, Sampling, Task

TASK = Task("t", "s", (Message(Role.USER, "?"),))
ASK: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]


async def said(one: Served, turns: GroupTurns, seed: int, **asked: Any) -> str:
    session = one.gateway.sessions.open(OpenRequest(Sampling(200, seed=seed)), turns=turns.of(0))
    async with openai.AsyncOpenAI(base_url=f"{one.url}/s/{session.token}/v1", api_key="-", max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK, **asked)
        return answer.choices[0].message.content or ""


@pytest.mark.parametrize(
    ("before", "after", "is_found"),
    [
        ({}, {}, True),
        ({}, {"max_tokens": 1}, False),
        ({}, {"stop": "a"}, False),
        ({"stop": "a"}, {}, False),
        ({"stop": "a"}, {"stop": "a"}, True),
        ({}, {"response_format": {"type": "json_object"}}, False),
    ],
)
async def test_only_the_same_request_is_answered_from_the_log(before: Any, after: Any, is_found: bool) -> None:
    log = memory_log(RunMeta(1, "drop", 1, 1)).connection

    def turns() -> GroupTurns:
        return GroupTurns("g", TASK, {"g"}, lambda run: run(log))

    async with served("seven a", "{}") as one:
        first = await said(one, turns(), 1, **before)
        again = await said(one, read_left(log, turns()), 2, **after)
        assert (len(one.engine.drawn) == 1) == is_found
        assert not is_found or again == first
