"""The agents of examples/swe mend a fault through a server of OpenAI's chat API, whose answers are written here."""

import asyncio
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from shoal.environments.workspace import small_task
from shoal.workspace.judge import judge
from shoal.workspace.task import WorkspaceTask, opened
from shoal.workspace.tools import Tools
from stub_server import Stub, stubbed

EXAMPLES = Path(__file__).parents[2] / "examples" / "swe"
TASK = WorkspaceTask(
    id="one",
    problem="program.py has a function f that should double. Mend it.",
    sources={"program.py": "def f(a):\n    return a * 3\n"},
    command=("python", "-m", "pytest", "-q", "test_hidden.py"),
    files={"test_hidden.py": "from program import f\n\n\ndef test_f():\n    assert f(2) == 4\n"},
    red=("test_hidden.py::test_f",),
)
MENDS = "sed -i s/3/2/ program.py"


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.append(str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


class Scripted(dict[str, tuple[int, bytes]]):
    """Answers of a stub, one after the other; the last one stays."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__()
        self.messages = messages

    def get(self, path: str, default: Any = None) -> tuple[int, bytes]:  # type: ignore[override]
        message = self.messages.pop(0) if len(self.messages) > 1 else self.messages[0]
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
        answer = {"id": "a", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, json.dumps({**answer, "usage": usage}).encode()


def call(name: str, **arguments: str) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


async def reward(agent: str, messages: list[dict[str, Any]]) -> float:
    """Reward of an agent whose model answers so."""
    work = import_module(agent).work
    async with stubbed(Stub(Scripted(messages))) as url, AsyncOpenAI(base_url=url, api_key="x") as client:
        with await opened(TASK) as workspace:
            await work(TASK.problem, Tools(workspace), client, 4)
            return (await judge(workspace, TASK)).reward


@pytest.mark.parametrize(
    ("agent", "mending"),
    [("bare_loop", {"content": f"```bash\n{MENDS}\n```"}), ("agents_sdk", call("bash", command=MENDS))],
)
def test_an_agent_mends_a_fault_by_commands_and_a_silent_one_does_not(agent: str, mending: dict[str, Any]) -> None:
    assert asyncio.run(reward(agent, [mending, {"content": "DONE"}])) == 1.0
    assert asyncio.run(reward(agent, [{"content": "DONE"}])) == 0.0


def test_an_agent_that_runs_out_of_turns_is_judged() -> None:
    assert asyncio.run(reward("agents_sdk", [call("bash", command=MENDS)])) == 1.0


def test_the_control_swaps_the_hidden_tests_within_a_split() -> None:
    from swapped import swapped

    numbered = [small_task(seed) for seed in range(6)]
    control = swapped(numbered)
    assert [task.id for task in control] == [task.id for task in numbered]
    assert [task.files for task in control] == [task.files for task in numbered[3:] + numbered[:3]]


def test_the_bare_loop_has_fifty_lines() -> None:
    assert len((EXAMPLES / "bare_loop.py").read_text().splitlines()) <= 50
