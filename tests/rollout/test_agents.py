"""Agents of three kinds on sessions of a run: what they come to, and what is left of them when something goes wrong."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from chat_templates import renderer
from gateway_engine import CONTEXT, ScriptedEngine
from shoal.config import RewardConfig
from shoal.errors import ConfigError, TaskError
from shoal.interfaces import Scorer
from shoal.reward.service import RewardService
from shoal.rollout.agents import AgentRunner, Host
from shoal.rollout.agents.clients import agent_of, command_play, function_play
from shoal.rollout.agents.host import Seat
from shoal.rollout.agents.runner import AgentFailed, Play
from shoal.tasks.remote_protocol import SessionAt
from shoal.tasks.remote_worker import HttpModel
from shoal.tasks.sdk import PolicyFailed
from shoal.trainer.advantage import rows
from shoal.types import Message, Outcome, Reward, Role, Rollout, RolloutStatus, Sampling, Task

ROOT = Path(__file__).parents[2]
TASK = Task("t/0", "t", (Message(Role.USER, "what is 2 + 3?"),), "5", '{"scorer": "number"}')
GAME = Task("g/0", "g", (Message(Role.USER, "10-16"),), "15", '{"low": 10, "high": 16, "number": 15}')


class Truth:
    """Implements `interfaces.Scorer` without processes: 1 for an answer that ends in the truth."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(float(answer.endswith(str(task.answer)))) for answer in answers]


def played(
    playing: AbstractAsyncContextManager[Play],
    *script: str | None,
    task: Task = TASK,
    timeout_s: float = 20.0,
    n: int = 1,
    max_model_len: int = CONTEXT,
    delay_s: float = 0.0,
    real_scorer: bool = False,
) -> list[Rollout]:
    """The rollouts of an agent at a scripted engine, over HTTP."""

    async def main() -> list[Rollout]:
        made = renderer("qwen3")
        engine = ScriptedEngine(made, list(script), delay_s=delay_s)
        hosting = Host.open(engine, made, max_model_len=max_model_len, sampling=Sampling(200, seed=0))
        async with contextlib.AsyncExitStack() as stack:
            scorer: Scorer = Truth()
            if real_scorer:
                scorer = await stack.enter_async_context(RewardService(RewardConfig()))
            host = await stack.enter_async_context(hosting)
            play = await stack.enter_async_context(playing)
            runner = AgentRunner(host, play, scorer, timeout_s=timeout_s, max_at_once=32)
            rollouts = list(await runner.rollouts(task, n))
            assert len(host.gateway.sessions) == 0, "every session was ended"
        drawn = sorted(len(completion.token_ids) for completion in engine.drawn)
        kept = sorted(len(turn.completion.token_ids) for one in rollouts for turn in one.turns)
        assert kept == drawn, "every drawn token is in exactly one turn"
        return rollouts

    return asyncio.run(main())


async def ask_twice(task: Task, client: openai.AsyncOpenAI) -> str:
    """Asks again whether the model is sure."""
    messages: list[Any] = [{"role": message.role.value, "content": message.content} for message in task.messages]
    said = ""
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "are you sure?"}]
    return said


def test_an_async_function_with_openai_s_client_trains_on_one_row_of_what_was_drawn() -> None:
    (rollout,) = played(function_play(ask_twice), "it is 6", "it is 5", real_scorer=True)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)
    (row,) = rows(rollout, 1.0)
    assert sum(row.mask) == rollout.drawn_tokens
    assert {version for version, m in zip(row.versions, row.mask, strict=True) if m} == {0, 1}


async def one_answer(task: Task, client: openai.AsyncOpenAI) -> Outcome:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
    return Outcome(reward=0.5, turn_rewards=(0.25,))


def test_an_outcome_has_rewards_of_the_turns() -> None:
    (rollout,) = played(function_play(one_answer))
    assert (rollout.reward.value, rollout.turns[0].reward) == (0.5, 0.25)


async def crash(task: Task, client: openai.AsyncOpenAI) -> None:
    await one_answer(task, client)
    raise KeyError("my own fault")


async def hang(task: Task, client: openai.AsyncOpenAI) -> None:
    await one_answer(task, client)
    await asyncio.sleep(60)


async def talk_on(task: Task, client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = []
    while True:
        messages.append({"role": "user", "content": "go on " * 20})
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def say_nothing(task: Task, client: openai.AsyncOpenAI) -> float:
    return 1.0


def test_an_agent_that_crashes_hangs_or_never_asks_gives_a_failed_rollout_with_its_reason() -> None:
    for agent, reason in ((crash, "agent: KeyError"), (hang, "deadline: "), (say_nothing, "agent: it asked the model")):
        (rollout,) = played(function_play(agent), timeout_s=1.5)
        assert rollout.status is RolloutStatus.FAILED
        assert rollout.reason.startswith(reason)


def test_a_conversation_that_fills_the_context_is_truncated_and_trained_with() -> None:
    (rollout,) = played(function_play(talk_on), max_model_len=400)
    assert rollout.status is RolloutStatus.TRUNCATED
    assert rollout.reason.startswith("context: ")
    assert len(rollout.turns) > 1
    assert rollout.reward.value == 0


@contextlib.asynccontextmanager
async def asking_elsewhere(*, too_much: bool) -> AsyncIterator[Play]:
    """As a service in a process of its own: one good request, then one that cannot be answered."""
    async with aiohttp.ClientSession() as http:

        async def play(task: Task, seat: Seat) -> Outcome:
            model = HttpModel(SessionAt(seat.base_url, seat.anthropic_base_url, seat.api_key), http)
            said = await model.answer(task.messages)
            more = [Message(Role.USER, "go on " * 400)] if too_much else []
            try:
                await model.answer([*task.messages, said, *more] if more else [])
            except PolicyFailed:
                return Outcome(reward=0.0)
            return Outcome(reward=1.0)

        yield play


def test_of_what_the_gateway_refuses_a_service_only_a_full_context_is_the_policy_s() -> None:
    (rollout,) = played(asking_elsewhere(too_much=True), max_model_len=400)
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED, 1)
    (rollout,) = played(asking_elsewhere(too_much=False))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reason.startswith("environment: HTTP 400")


def test_nobody_but_the_run_opens_sessions_at_its_gateway() -> None:
    @contextlib.asynccontextmanager
    async def intruding() -> AsyncIterator[Play]:
        async def play(task: Task, seat: Seat) -> Outcome:
            root = seat.base_url.partition("/s/")[0]
            headers = {"authorization": f"Bearer {seat.api_key}"}
            async with aiohttp.ClientSession() as http, http.post(f"{root}/v1/sessions", headers=headers) as answer:
                raise AgentFailed(f"HTTP {answer.status}")

        yield play

    (rollout,) = played(intruding())
    assert rollout.reason == "HTTP 401"


def test_an_engine_that_is_gone_fails_the_rollout_and_an_engine_that_comes_back_does_not() -> None:
    (rollout,) = played(function_play(ask_twice), "it is 5", *[None] * 40, timeout_s=60)
    assert rollout.status is RolloutStatus.FAILED
    assert "the engine is gone" in rollout.reason
    assert len(rollout.turns) == 1
    (rollout,) = played(function_play(ask_twice), "it is 5", None, "it is 5", timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)


def test_a_task_that_nothing_can_score_fails_its_rollouts_and_not_the_run() -> None:
    (rollout,) = played(function_play(ask_twice), task=GAME, real_scorer=True)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reason.startswith("scorer: ")


def command(source: str) -> AbstractAsyncContextManager[Play]:
    return command_play((sys.executable, "-c", source))


ASK = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
"""


def test_a_command_finds_the_session_in_its_environment_and_ends_how_it_likes() -> None:
    ends = {
        "print('it is', task['answer'])": (RolloutStatus.FINISHED, 1.0, ""),
        "print(json.dumps({'reward': 0.25}))": (RolloutStatus.FINISHED, 0.25, ""),
        "sys.exit('no more')": (RolloutStatus.FAILED, 0.0, "agent: its process ended with code 1: no more"),
        "print('{oops')": (RolloutStatus.FAILED, 0.0, "agent: expected an outcome as JSON"),
        "import time; time.sleep(60)": (RolloutStatus.FAILED, 0.0, "deadline: "),
    }

    for end, (status, value, reason) in ends.items():
        (rollout,) = played(command(ASK + end), timeout_s=4.0 if "sleep" in end else 60.0)
        assert (rollout.status, rollout.reward.value) == (status, value), rollout.reason
        assert rollout.reason.startswith(reason)
        assert len(rollout.turns) == 1


def test_a_command_that_cannot_be_started_is_a_reason() -> None:
    (rollout,) = played(command_play(("/no/such/program",)))
    assert "cannot be started" in rollout.reason


GUESSES = ("13", "I say 15")


@pytest.mark.parametrize(
    "named",
    [
        "examples.agents.guess_openai:guess",
        "examples.agents.framework:guess",
        [sys.executable, str(ROOT / "examples/agents/guess_process.py")],
    ],
)
def test_the_three_examples_play_the_same_game(named: str | Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (rollout,) = played(agent_of(named).play(), *GUESSES, task=GAME, timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason
    (row,) = rows(rollout, 1.0)
    assert sum(row.mask) == rollout.drawn_tokens


def test_a_framework_s_own_tools_are_called_in_the_format_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    (rollout,) = played(agent_of("examples.agents.framework:calculate").play(), call, "it is 5", timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason
    assert [message.content for message in rollout.messages if message.role is Role.TOOL] == ["5"]
    assert len(rows(rollout, 1.0)) == 1


@pytest.mark.parametrize(
    "named", ["json", "json:nothing", "json:dumps", "no_such:f", {"run": [], "timeout_s": 1}, {"walk": "a:b"}]
)
def test_an_agent_that_cannot_be_found_is_refused_before_the_run(named: Any) -> None:
    with pytest.raises((ConfigError, TaskError), match="agent: "):
        agent_of(named)


def test_many_conversations_at_once_lose_no_token() -> None:
    rollouts = played(function_play(ask_twice), *["it is 5"] * 200, n=100, delay_s=0.01, timeout_s=100)
    assert {rollout.reward.value for rollout in rollouts} == {1.0}
    assert json.dumps([len(rollout.turns) for rollout in rollouts]) == json.dumps([2] * 100)
