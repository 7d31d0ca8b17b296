"""The environment `workspace`: a model mends a program by commands or tools, and hidden tests give the reward."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_environments_turns import played, service

from benchmarks.work import CoinScorer
from chat_templates import renderer
from gateway_engine import CONTEXT, ScriptedEngine
from shoal import wire
from shoal.environments.workspace import command_in
from shoal.errors import TaskError
from shoal.gateway.host import Host
from shoal.interfaces import Purpose
from shoal.rollout.agents.runner import AgentRunner
from shoal.types import Rollout, RolloutStatus, Sampling, Split, Task
from shoal.workspace.tree import trees_directory

pytest_plugins = ("small_workspaces",)
SUMS = {
    "id": "sums",
    "problem": "add subtracts. Mend it.",
    "tree": "source",
    "command": ["python", "-m", "pytest", "-q", "tests/test_sums.py"],
    "red": ["tests/test_sums.py::test_it_adds"],
    "green": ["tests/test_sums.py::test_it_is_callable"],
    "restored": ["tests"],
}


def block(command: str) -> str:
    return f"I do this:\n```bash\n{command}\n```"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def tasks(source: Path) -> str:
    lines = [
        {**SUMS, "id": half, "split": half, "problem": f"{SUMS['problem']} ({half})"} for half in ("train", "eval")
    ]
    file = source.parent / "tasks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_a_small_program_is_mended_by_commands(own_cache: None) -> None:
    from shoal.environments.programs import PROGRAMS

    game = service("workspace")
    task = game.draw(Split.TRAIN, 0)
    right = next(program for program in PROGRAMS if program.what in task.messages[1].content)
    write = f"cat > program.py <<'EOF'\n{right.source}EOF"
    rollout = played(game, task, block("cat program.py"), block(write), "DONE")
    assert (rollout.status, rollout.reward.value, len(rollout.turns)) == (RolloutStatus.FINISHED, 1.0, 3)
    assert "def f(" in rollout.messages[3].content
    assert played(game, task, "DONE").reward.value == 0.0
    ends = played(game, task, block("echo 'import os; os._exit(0)' > program.py"), "DONE").reward
    assert (ends.value, ends.evidence.splitlines()[-1]) == (0.0, "still red: test_hidden.py::test_f")
    assert (
        played(game, task, block("ls -a; find / -name 'test_hidden*' 2>&1"), "DONE").messages[3].content.count("hidden")
        == 0
    )


def test_a_command_is_what_stands_in_the_block_without_empty_lines_around_it() -> None:
    assert command_in(block("\n  printf %s a\\ \n")) == "  printf %s a\\ "


def test_the_tasks_of_a_file_come_once_in_each_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    lines = [{**SUMS, "id": str(i), "split": "train" if i else "eval", "problem": f"Mend {i}."} for i in range(9)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    game = service("workspace", tasks=str(file))
    first, second = ([game.draw(Split.TRAIN, index).info for index in range(at, at + 8)] for at in (0, 8))
    assert len({*first}) == 8
    assert {*first} == {*second}
    assert first != second


def test_a_task_of_a_file_is_mended_by_calls(tasks: str) -> None:
    game = service("workspace", tasks=tasks, calls=True)
    task = game.draw(Split.EVAL, 3)
    assert "(eval)" in task.messages[1].content
    script = [
        call("read", path="sums.py"),
        call("edit", path="sums.py", old_text="a - b", new_text="a + b")
        + call("bash", command="python -m pytest -q tests"),
        "DONE",
    ]
    rollout = played(game, task, *script)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)
    assert "2 passed" in rollout.messages[-2].content
    lines = re.sub(r"\d+\.\d+ s", "some s", rollout.reward.evidence).splitlines()
    assert lines[:3] == ["command 1: some s", "command 2: some s", "--- a/sums.py"]
    assert lines[-5:-3] == ["-    return a - b", "+    return a + b"]
    assert lines[-3:] == ["command 3: some s", "verdict: 1 in some s", f"turned green: {SUMS['red'][0]}"]
    assert (
        played(game, task, call("edit", path="sums.py", old_text="def add", new_text="def sub"), "DONE").reward.value
        == 0
    )


def test_names_that_are_no_text_reach_the_log(tasks: str) -> None:
    game = service("workspace", tasks=tasks)
    rollout = played(
        game, game.draw(Split.TRAIN, 0), block("echo 1 > $'\\xff'; sed -i 's/a - b/a + b/' sums.py"), "DONE"
    )
    assert rollout.reward.value == 1.0
    assert "+++ b/?" in rollout.reward.evidence
    assert wire.encode(rollout)


def test_a_turn_too_many_is_not_taken_and_the_verdict_comes_anyway(tasks: str) -> None:
    game = service("workspace", tasks=tasks, turns=1)
    rollout = played(game, game.draw(Split.TRAIN, 0), block("sed -i 's/a - b/a + b/' sums.py"))
    assert (len(rollout.turns), rollout.reward.value) == (1, 1.0)


MEND = "sed -i 's/a - b/a + b/' sums.py"


def group(game: Any, task: Task, *script: str | None, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
    """The rollouts of a group at a scripted engine."""

    async def main() -> tuple[Rollout, ...]:
        made = renderer("qwen3")
        async with Host.open(ScriptedEngine(made, list(script)), made, max_model_len=CONTEXT) as host:
            runner = AgentRunner(host, game.rollout, CoinScorer(), Sampling(400, seed=0), timeout_s=60)
            return await runner.rollouts(task, n, purpose)

    return asyncio.run(main())


@pytest.mark.parametrize("calls", [False, True])
def test_a_group_goes_on_from_the_state_of_its_first_rollout(calls: bool, tasks: str) -> None:
    game = service("workspace", tasks=tasks, fork_after=1, calls=calls)
    begun = (
        call("bash", command="cd tests; sed -i 's/a - b/a + b/' ../sums.py")
        if calls
        else block("cd tests; sed -i 's/a - b/a + b/' ../sums.py")
    )
    before = {*trees_directory().glob("forks/*")}
    first, *others = group(game, game.draw(Split.TRAIN, 0), begun, *["DONE"] * 3, n=3)
    assert [len(one.turns) for one in (first, *others)] == [2, 1, 1]
    assert [one.reward.value for one in (first, *others)] == [1.0, 1.0, 1.0]
    for other in others:
        assert other.messages == first.messages
        assert other.reward.evidence.startswith("goes on after answer 1 of the group's first rollout\nverdict")
    assert {*trees_directory().glob("forks/*")} == before


@pytest.mark.parametrize("end", ["DONE", None])
def test_a_group_whose_first_rollout_ends_early_or_fails_begins_for_itself(end: str | None, tasks: str) -> None:
    game = service("workspace", tasks=tasks, fork_after=1)
    first, other = group(game, game.draw(Split.TRAIN, 0), end, block(MEND), "DONE", n=2)
    assert first.status is (RolloutStatus.FINISHED if end else RolloutStatus.FAILED)
    assert (first.reward.value, other.reward.value, len(other.turns)) == (0.0, 1.0, 2)


def test_held_out_answers_and_single_ones_begin_for_themselves(tasks: str) -> None:
    game = service("workspace", tasks=tasks, fork_after=1)
    script = [*[block(MEND)] * 2, *["DONE"] * 2]
    held_out = group(game, game.draw(Split.EVAL, 0), *script, n=2, purpose=Purpose.SAMPLED)
    alone = group(game, game.draw(Split.TRAIN, 0), block(MEND), "DONE", n=1)
    assert [(one.reward.value, len(one.turns)) for one in (*held_out, *alone)] == [(1.0, 2)] * 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "a"}', "line 1.*problem"),
        ('{"id": "a", "problem": "b", "tree": "c", "colour": 1}', "line 1.*colour"),
        ("", "expected a task on each line"),
        ('{"id": "a", "problem": "b", "split": "train"}', "found no eval"),
    ],
)
def test_a_wrong_file_is_named_before_the_run(line: str, says: str, tmp_path: Path, own_cache: None) -> None:
    (tmp_path / "tasks.jsonl").write_text(line)
    with pytest.raises(TaskError, match=says):
        service("workspace", tasks=str(tmp_path / "tasks.jsonl")).check()


def test_wrong_settings_are_refused() -> None:
    given: Any
    for given in ({"turns": 0}, {"command_s": 0}, {"most_characters": 5}, {"colour": 1}, {"fork_after": -1}):
        with pytest.raises(TaskError):
            service("workspace", **given)
    with pytest.raises(TaskError, match="fork_after: expected less than turns = 3, got 3"):
        service("workspace", turns=3, fork_after=3).check()
