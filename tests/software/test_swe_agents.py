"""The agents of examples/swe mend a fault through a server of OpenAI's chat API, whose answers are written here."""

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.environments.workspace import command_in, small_task
from shoal.errors import TaskError
from shoal.net.chat import close_clients
from shoal.net.client import session
from shoal.tasks.remote_worker import HttpModel
from shoal.types import Split
from shoal.workspace.judge import judge
from shoal.workspace.task import WorkspaceTask, opened
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


async def reward(agent: str, messages: list[dict[str, Any]], folder: Path) -> float:
    """Reward of an agent whose model answers so."""
    from swe import Swe

    halves = [
        msgspec.structs.replace(TASK, id=split, problem=f"{TASK.problem} ({split})", split=split) for split in Split
    ]
    (folder / "tasks.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, halves)))
    game = Swe(tasks=str(folder / "tasks.jsonl"), agent=agent, turns=4)
    async with stubbed(Stub(Scripted(messages))) as url, session(1) as http:
        outcome = await game.rollout(game.draw(Split.TRAIN, 0), HttpModel(url, url, "x", http))
    await close_clients()
    assert "turned green: test_hidden.py" in outcome.evidence or not outcome.reward
    assert outcome.reward is not None
    return outcome.reward


@pytest.mark.parametrize(
    ("agent", "mending"),
    [("bare_loop", {"content": f"```bash\n{MENDS}\n```"}), ("agents_sdk", call("bash", command=MENDS))],
)
def test_an_agent_mends_a_fault_by_commands_and_a_silent_one_does_not(
    agent: str, mending: dict[str, Any], tmp_path: Path
) -> None:
    assert asyncio.run(reward(agent, [mending, {"content": "DONE"}], tmp_path)) == 1.0
    assert asyncio.run(reward(agent, [{"content": "DONE"}], tmp_path)) == 0.0


def test_an_agent_that_runs_out_of_turns_is_judged(tmp_path: Path) -> None:
    assert asyncio.run(reward("agents_sdk", [call("bash", command=MENDS)], tmp_path)) == 1.0


def test_agents_cannot_fork_with_their_workspace() -> None:
    from swe import Swe

    with pytest.raises(TaskError, match="fork_after: expected 0 with an agent"):
        Swe(fork_after=1).check()


def test_the_careless_teacher_mends_some_programs_and_shows_no_fault_that_is_held_out() -> None:
    from small_programs import faults, lessons, tasks

    async def played(lesson: dict[str, Any], task: WorkspaceTask) -> float:
        with await opened(task) as workspace:
            commands = [command_in(said["content"]) for said in lesson["messages"] if said["role"] == "assistant"]
            shown = [(await workspace.run(command)).stdout.decode() for command in commands if command]
            assert shown[0] == lesson["messages"][3]["content"]
            return (await judge(workspace, task)).reward

    drawn = [*tasks()]
    train = [task for task in drawn if task.split == "train"]
    assert not {task.sources["program.py"] for task in train} & {fault.wrong for fault in faults() if fault.held_out}
    assert len({task.sources["program.py"] for task in drawn if task.split == "eval"}) >= 20
    assert {asyncio.run(played(lesson, task)) for lesson, task in zip(islice(lessons(), 8), train, strict=False)} == {
        0.0,
        1.0,
    }


def test_the_control_swaps_the_hidden_tests_within_a_split() -> None:
    from swapped import swapped

    numbered = [small_task(seed) for seed in range(6)]
    control = swapped(numbered)
    assert [task.id for task in control] == [task.id for task in numbered]
    assert [task.files for task in control] == [task.files for task in numbered[3:] + numbered[:3]]


def test_the_bare_loop_has_fifty_lines() -> None:
    assert len((EXAMPLES / "bare_loop.py").read_text().splitlines()) <= 50
