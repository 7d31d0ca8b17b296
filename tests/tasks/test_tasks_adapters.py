"""Tasks written for other frameworks: TRL's reward functions and environments, OpenEnv's servers.

OpenEnv's server here speaks as openenv-core 0.3 does; `make adapters` has the real one, and verifiers.
"""

import asyncio
import json
import random
import threading

import pytest
from aiohttp import WSMsgType, web
from trl.rewards import think_format_reward

from openenv_game_client import Scripted, played_game
from shoal.environments.openenv import openenv_task
from shoal.environments.trl import trl_task
from shoal.errors import TaskError
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed
from shoal.types import Message, RewardStatus, Role, Split, ToolCall

ROWS = [{"prompt": f"double {n}", "answer": str(2 * n), "n": n} for n in range(40)]
CHATS = [{"prompt": [{"role": "user", "content": f"double {n}"}], "answer": str(2 * n)} for n in range(40)]


def correct(prompts, completions, answer, **columns):
    return [float(said == true) for said, true in zip(completions, answer, strict=True)]


def nothing_to_say(completions, **columns):
    return [None] * len(completions)


async def short(completions, **columns):
    return [1.0 - len(said) / 10 for said in completions]


def test_trl_s_reward_functions_are_called_as_trl_calls_them_and_weighed() -> None:
    served = trl_task("d", ROWS, reward_funcs=[correct, nothing_to_say, short], reward_weights=[1.0, 5.0, 0.5])
    assert (served.converses, served.scores) == (False, True)
    task = served.draw(Split.TRAIN, 3)
    assert task == served.draw(Split.TRAIN, 3)
    right, wrong = asyncio.run(served.score(task, [str(task.answer), "?"]))
    assert right.value == pytest.approx(1.0 + 0.5 * (1 - len(str(task.answer)) / 10))
    assert wrong.value == pytest.approx(0.45)


def test_an_answer_of_which_no_function_of_trl_s_kind_says_anything_is_not_worth_0() -> None:
    served = trl_task("d", ROWS, reward_funcs=[nothing_to_say, nothing_to_say])
    (reward,) = asyncio.run(served.score(served.draw(Split.TRAIN, 0), ["?"]))
    assert (reward.status, reward.evidence) == (RewardStatus.FAILED, "every reward function gave None")


def rarest(prompts, completions, question_id, **columns):
    assert len(set(map(str, prompts))) == len(set(question_id)) == 1
    return [1.0 / completions.count(said) for said in completions]


def dropped(completions, **columns):
    return [1.0]


def test_a_reward_function_of_trl_s_kind_may_compare_the_completions_of_a_group() -> None:
    rows = [{**row, "question_id": i} for i, row in enumerate(ROWS)]
    served = trl_task("d", rows, reward_funcs=[rarest])
    scored = asyncio.run(served.score(served.draw(Split.TRAIN, 0), ["a", "b", "a", "a"]))
    assert [one.value for one in scored] == pytest.approx([1 / 3, 1.0, 1 / 3, 1 / 3])
    served = trl_task("d", rows, reward_funcs=[dropped])
    scored = asyncio.run(served.score(served.draw(Split.TRAIN, 0), ["a", "b"]))
    assert {(one.status, one.evidence) for one in scored} == {
        (RewardStatus.FAILED, "d: ValueError: dropped: expected 2 rewards, got 1")
    }


def test_a_reward_function_of_trl_s_own_scores_conversations() -> None:
    served = trl_task("d", CHATS, reward_funcs=[think_format_reward])
    task = served.draw(Split.EVAL, 0)
    scored = asyncio.run(served.score(task, ["<think>2 times</think>4", "4"]))
    assert [one.value for one in scored] == [1.0, 0.0]


def test_rows_are_split_by_their_text_and_every_epoch_has_each_once() -> None:
    served = trl_task("d", ROWS, reward_funcs=[correct])
    epoch = [served.draw(Split.TRAIN, index).messages for index in range(40)]
    held_out = {served.draw(Split.EVAL, index).messages for index in range(40)}
    assert len(set(epoch)) + len(held_out) == 40
    assert not set(epoch) & held_out
    with pytest.raises(TaskError, match="neither"):
        trl_task("d", ROWS)
    with pytest.raises(TaskError, match="row 0: expected a prompt"):
        trl_task("d", [{"question": "?"}], reward_funcs=[correct])


class Counter:
    """A TRL environment: the model counts up to a goal by calling a tool."""

    def reset(self, n, **row):
        self.goal, self.count = n, 0
        return f" Count to {n}."

    def add(self, by: int) -> str:
        """
        Adds to the count.

        Args:
            by: How much.
        """
        self.count += by
        return f"the count is {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)


def call(name: str, **arguments) -> Message:
    return Message(Role.ASSISTANT, "", (ToolCall("c1", name, json.dumps(arguments)),))


def test_an_environment_of_trl_s_kind_is_played_with_tools_until_the_model_calls_none() -> None:
    served = trl_task("count", ROWS, environment_factory=Counter)
    assert (served.converses, served.scores) == (True, False)
    task = served.draw(Split.TRAIN, 0)
    goal = json.loads(task.info)["row"]
    model = Scripted(call("add", by=goal - 1), call("subtract", by=1), call("add", by="x"), call("add", by=1), "done")
    assert asyncio.run(served.rollout(task, model)).reward == 1.0
    last, tools = model.asked[-1]
    assert last[0].content == f"double {goal} Count to {goal}."
    assert next(message.content for message in last if message.role is Role.TOOL) == f"the count is {goal - 1}"
    assert "there is no tool 'subtract'" in last[4].content
    assert "unsupported operand" in json.loads(last[6].content)["error"]
    (described,) = json.loads(tools)
    assert described["function"]["parameters"]["properties"] == {"by": {"type": "integer", "description": "How much."}}
    assert asyncio.run(served.rollout(task, Scripted("no"))).reward == float(goal == 0)


def test_rewards_see_the_environment_and_the_whole_conversation() -> None:
    def turns(completions, environments, **columns):
        return [len(completions[0]) + 100 * environments[0].count]

    rows = [{**row, "n": number} for number, row in enumerate(CHATS)]
    served = trl_task("count", rows, environment_factory=Counter, reward_funcs=[turns])
    task = served.draw(Split.TRAIN, 0)
    outcome = asyncio.run(served.rollout(task, Scripted(call("add", by=7), "done")))
    assert outcome.reward == 703 + float(json.loads(task.info)["row"] == 7)


def test_a_call_whose_arguments_are_no_json_is_answered_with_an_error_and_shown_to_rewards_as_it_is() -> None:
    seen = []

    def calls(completions, **columns):
        seen.extend(one["tool_calls"][0]["function"]["arguments"] for one in completions[0] if "tool_calls" in one)
        return [1.0]

    served = trl_task("count", [{**row, "n": 1} for row in CHATS], environment_factory=Counter, reward_funcs=[calls])
    broken = Message(Role.ASSISTANT, "", (ToolCall("c1", "add", '{"by": '),))
    model = Scripted(broken, "done")
    assert asyncio.run(served.rollout(served.draw(Split.TRAIN, 0), model)).reward == 1.0
    assert seen == ['{"by": ']
    assert "error" in model.asked[-1][0][-1].content


async def game(request: web.Request) -> web.WebSocketResponse:
    """The messages of openenv-core 0.3's /ws, and the game of `openenv_game`."""
    socket, word, left = web.WebSocketResponse(), "", 0
    await socket.prepare(request)
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            break
        asked = json.loads(message.data)
        match asked["type"]:
            case "reset":
                seed = asked["data"]["seed"]
                word, left = "".join(random.Random(seed).sample("abcdefgh", 3)), 3
                data = {"observation": {"message": f"Game {seed}: guess a letter."}, "reward": None, "done": False}
            case "step" if asked["data"].get("letter") == "!":
                broken = {"message": "VALIDATION of the board failed", "code": "EXECUTION_ERROR"}
                await socket.send_json({"type": "error", "data": broken})
                continue
            case "step" if "letter" not in asked["data"]:
                await socket.send_json({"type": "error", "data": {"message": "?", "code": "VALIDATION_ERROR"}})
                continue
            case "step":
                left -= 1
                hit = asked["data"]["letter"] in word
                data = {"observation": {"message": "yes" if hit else "no"}, "reward": hit / 2, "done": left == 0}
            case _:
                break
        await socket.send_json({"type": "observation", "data": data})
    return socket


async def schema(request: web.Request) -> web.Response:
    return web.json_response({"action": {"required": ["letter"], "properties": {"letter": {"type": "string"}}}})


@pytest.fixture
def server():
    """The URL of the game, served by a thread."""
    started, urls, loop = threading.Event(), [], asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/ws", game), web.get("/schema", schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(site.name if not runner.addresses else f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await stopped.wait()
        await runner.cleanup()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(10)
    yield urls[0]
    loop.call_soon_threadsafe(stopped.set)
    thread.join()
    loop.close()


def test_an_openenv_server_is_played_by_seed_and_earns_what_its_steps_earn(server: str) -> None:
    played_game(server)


@pytest.mark.parametrize(("said", "kind"), [("!", EnvironmentFailed), ('{"word": "x"}', PolicyFailed)])
def test_of_what_an_openenv_server_refuses_only_an_action_that_is_none_is_the_policy_s(
    server: str, said: str, kind: type[Exception]
) -> None:
    served = openenv_task("game", server)
    with pytest.raises(kind):
        asyncio.run(served.rollout(served.draw(Split.TRAIN, 0), Scripted(Message(Role.ASSISTANT, said))))


def test_an_openenv_server_that_is_away_is_the_environment_s_failure() -> None:
    served = openenv_task("game", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentFailed):
        served.draw(Split.TRAIN, 0)
