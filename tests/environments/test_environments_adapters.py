"""Tasks written for other frameworks: TRL's reward functions and environments, and verifiers.

The environment of verifiers is asked as in 0.4; `make adapters` has the real one.
"""

import asyncio
import json
import os
import sys
import threading
from typing import Any

import pytest
from trl.rewards import think_format_reward

from shoal.environments.trl import trl_environment
from shoal.environments.verifiers import verifiers_environment
from shoal.errors import TaskError
from shoal.tasks.sdk import EnvironmentFailed
from shoal.types import Message, RewardStatus, Role, Split, ToolCall
from verifiers_alike import MODULES

ROWS = [{"prompt": f"double {n}", "answer": str(2 * n), "n": n} for n in range(40)]
CHATS = [{"prompt": [{"role": "user", "content": f"double {n}"}], "answer": str(2 * n)} for n in range(40)]


class Scripted:
    """Says the next of a list."""

    base_url = api_key = ""

    def __init__(self, *said: Message | str) -> None:
        self.said = [one if isinstance(one, Message) else Message(Role.ASSISTANT, one) for one in said]
        self.asked: list[tuple[tuple[Message, ...], str]] = []

    async def answer(self, messages, *, tools="", max_tokens=None):
        self.asked.append((tuple(messages), tools))
        return self.said.pop(0)


def correct(prompts, completions, answer, **columns):
    return [float(said == true) for said, true in zip(completions, answer, strict=True)]


def nothing_to_say(completions, **columns):
    return [None] * len(completions)


async def short(completions, **columns):
    return [1.0 - len(said) / 10 for said in completions]


def test_trl_s_reward_functions_are_called_as_trl_calls_them_and_weighed() -> None:
    served = trl_environment("d", ROWS, reward_funcs=[correct, nothing_to_say, short], reward_weights=[1.0, 5.0, 0.5])
    assert (served.converses, served.scores) == (False, True)
    task = served.draw(Split.TRAIN, 3)
    assert task == served.draw(Split.TRAIN, 3)
    right, wrong = asyncio.run(served.score(task, [str(task.answer), "?"]))
    assert right.value == pytest.approx(1.0 + 0.5 * (1 - len(str(task.answer)) / 10))
    assert wrong.value == pytest.approx(0.45)


def test_an_answer_of_which_no_function_of_trl_s_kind_says_anything_is_not_worth_0() -> None:
    served = trl_environment("d", ROWS, reward_funcs=[nothing_to_say, nothing_to_say])
    (reward,) = asyncio.run(served.score(served.draw(Split.TRAIN, 0), ["?"]))
    assert (reward.status, reward.evidence) == (RewardStatus.FAILED, "every reward function gave None")


def rarest(prompts, completions, question_id, **columns):
    assert len(set(map(str, prompts))) == len(set(question_id)) == 1
    return [1.0 / completions.count(said) for said in completions]


def dropped(completions, **columns):
    return [1.0]


def test_a_reward_function_of_trl_s_kind_may_compare_the_completions_of_a_group() -> None:
    rows = [{**row, "question_id": i} for i, row in enumerate(ROWS)]
    served = trl_environment("d", rows, reward_funcs=[rarest])
    scored = asyncio.run(served.score(served.draw(Split.TRAIN, 0), ["a", "b", "a", "a"]))
    assert [one.value for one in scored] == pytest.approx([1 / 3, 1.0, 1 / 3, 1 / 3])
    served = trl_environment("d", rows, reward_funcs=[dropped])
    scored = asyncio.run(served.score(served.draw(Split.TRAIN, 0), ["a", "b"]))
    assert {(one.status, one.evidence) for one in scored} == {
        (RewardStatus.FAILED, "d: ValueError: dropped: expected 2 rewards, got 1")
    }


def test_a_reward_function_of_trl_s_kind_takes_its_time_without_the_run_s_event_loop() -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow(completions, **columns):
        begun.set()
        return [float(ended.wait(5))] * len(completions)

    async def main() -> float:
        served = trl_environment("d", ROWS, reward_funcs=[slow])
        scoring = asyncio.create_task(served.score(served.draw(Split.TRAIN, 0), ["a"]))
        await asyncio.to_thread(begun.wait)
        ended.set()
        return (await scoring)[0].value

    assert asyncio.run(main()) == 1.0


def test_a_reward_function_of_trl_s_own_scores_conversations() -> None:
    served = trl_environment("d", CHATS, reward_funcs=[think_format_reward])
    task = served.draw(Split.EVAL, 0)
    scored = asyncio.run(served.score(task, ["<think>2 times</think>4", "4"]))
    assert [one.value for one in scored] == [1.0, 0.0]


def test_rows_are_split_by_their_text_and_every_epoch_has_each_once() -> None:
    served = trl_environment("d", ROWS, reward_funcs=[correct])
    epoch = [served.draw(Split.TRAIN, index).messages for index in range(40)]
    held_out = {served.draw(Split.EVAL, index).messages for index in range(40)}
    assert len(set(epoch)) + len(held_out) == 40
    assert not set(epoch) & held_out
    with pytest.raises(TaskError, match="neither"):
        trl_environment("d", ROWS)
    with pytest.raises(TaskError, match="row 0: expected a prompt"):
        trl_environment("d", [{"question": "?"}], reward_funcs=[correct])


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
    served = trl_environment("count", ROWS, environment_factory=Counter)
    assert (served.converses, served.scores) == (True, False)
    task = served.draw(Split.TRAIN, 0)
    goal = json.loads(task.info)["row"]
    model = Scripted(call("add", by=goal - 1), call("subtract", by=1), call("add", by="x"), call("add", by=1), "done")
    assert asyncio.run(served.rollout(task, model)).reward == 1.0
    last, tools = model.asked[-1]
    assert last[0].content == f"double {goal} Count to {goal}."
    assert next(message.content for message in last if message.role is Role.TOOL) == f"the count is {goal - 1}"
    assert "tool 'subtract' not found" in last[4].content
    assert "unsupported operand" in json.loads(last[6].content)["error"]
    (described,) = json.loads(tools)
    assert described["function"]["parameters"]["properties"] == {"by": {"type": "integer", "description": "How much."}}
    assert asyncio.run(served.rollout(task, Scripted("no"))).reward == float(goal == 0)


def test_tools_without_an_environment_earn_what_the_reward_functions_say() -> None:
    def double(n: int) -> str:
        """
        Doubles a number.

        Args:
            n: The number.
        """
        return str(2 * n)

    def outcome(function: Any) -> Any:
        served = trl_environment("tools", ROWS, tools=[double], reward_funcs=[function])
        return asyncio.run(served.rollout(served.draw(Split.TRAIN, 0), Scripted(call("double", n=2), "4")))

    assert outcome(lambda completions, **columns: [float(completions[0])]).reward == 4.0
    with pytest.raises(EnvironmentFailed, match="None"):
        outcome(nothing_to_say)


def test_a_tool_s_result_is_no_completion_of_the_model_where_the_conversation_is_cut() -> None:
    seen = []

    def said(completions, **columns):
        seen.extend(completions)
        return [0.0]

    served = trl_environment("count", ROWS, environment_factory=Counter, reward_funcs=[said])
    asked = [call("add", by=1) for _ in range(15)]
    last = Message(Role.ASSISTANT, "once more", call("add", by=1).tool_calls)
    asyncio.run(served.rollout(served.draw(Split.TRAIN, 0), Scripted(*asked, last)))
    assert seen == ["once more"]


def test_rewards_see_the_environment_and_the_whole_conversation() -> None:
    def turns(completions, environments, **columns):
        return [len(completions[0]) + 100 * environments[0].count]

    rows = [{**row, "n": number} for number, row in enumerate(CHATS)]
    served = trl_environment("count", rows, environment_factory=Counter, reward_funcs=[turns])
    task = served.draw(Split.TRAIN, 0)
    outcome = asyncio.run(served.rollout(task, Scripted(call("add", by=7), "done")))
    assert outcome.reward == 703 + float(json.loads(task.info)["row"] == 7)


def test_a_call_whose_arguments_are_no_json_is_answered_with_an_error_and_shown_to_rewards_as_it_is() -> None:
    seen = []

    def calls(completions, **columns):
        seen.extend(one["tool_calls"][0]["function"]["arguments"] for one in completions[0] if "tool_calls" in one)
        return [1.0]

    served = trl_environment(
        "count", [{**row, "n": 1} for row in CHATS], environment_factory=Counter, reward_funcs=[calls]
    )
    broken = Message(Role.ASSISTANT, "", (ToolCall("c1", "add", '{"by": '),))
    model = Scripted(broken, "done")
    assert asyncio.run(served.rollout(served.draw(Split.TRAIN, 0), model)).reward == 1.0
    assert seen == ['{"by": ']
    assert "error" in model.asked[-1][0][-1].content


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers, as far as Shoal uses it."""
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("verifiers")
def test_a_verifiers_taskset_is_drawn_and_its_episodes_earn_what_their_traces_earn() -> None:
    env: Any = {"rewards": [0.5, 0.25], "taskset": {"system": "Be brief."}}
    served = verifiers_environment("sums", taskset="add", env=env, most_tasks=5, max_running=7, eval_share=0.5)
    assert (served.name, served.converses, served.scores, served.max_running) == ("sums", True, False, 7)
    drawn = [served.draw(split, index) for split in Split for index in range(30)]
    assert {tuple(one.content for one in task.messages) for task in drawn} == {
        ("Be brief.", f"add {i}") for i in range(5)
    }
    at = Scripted()
    at.base_url = "http://session"

    async def main() -> list[float | None]:
        outcomes = await asyncio.gather(*(served.rollout(task, at) for task in drawn[:3]))
        return [outcome.reward for outcome in outcomes]

    assert asyncio.run(main()) == [0.75] * 3
    for task, (played, times, context) in zip(drawn, served.author._env.played, strict=False):
        assert (played.data.prompt_text, times) == (task.messages[1].content, 1)
        assert (context.model, context.client.base_url) == ("policy", "http://session")
        assert os.environ[context.client.api_key_var], "verifiers wants one"


@pytest.mark.usefixtures("verifiers")
def test_what_goes_wrong_in_a_verifiers_episode_or_before_it_is_the_environment_s_failure() -> None:
    def of(**env: Any) -> Any:
        return verifiers_environment("sums", taskset="add", env=env, most_tasks=5)

    async def failures(served: Any) -> list[str]:
        task = served.draw(Split.TRAIN, 0)
        ended = await asyncio.gather(*(served.rollout(task, Scripted()) for _ in range(2)), return_exceptions=True)
        ended.append((await served.rollout(task, Scripted())).reward)
        return [str(one) if isinstance(one, EnvironmentFailed) else one for one in ended]

    assert asyncio.run(failures(of(away=[1]))) == ["ConnectionError: no container"] * 2 + [1.0], "it is tried again"
    for env, why in (({"wrong": ["full", "late"]}, "SandboxError: full"), ({"broken": "bug"}, "EnvError: bug")):
        with pytest.raises(EnvironmentFailed, match=f"^{why}$"):
            asyncio.run(failures(of(**env)))
    with pytest.raises(ValueError, match="rewards"):
        of(id="plain", rewards=[1.0])
    assert of(id="plain").draw(Split.TRAIN, 0).messages[0].content.startswith("add ")
