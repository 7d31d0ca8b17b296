"""Tasks in a workspace: the model works in a file tree by commands or tools, and hidden tests decide.

Each rollout has its own fork of the task's tree. The model's commands run in the sandbox; the conversation and the
verdict stay outside of it.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.environments.programs import PROGRAMS, SmallProgram, argument, slipped
from shoal.environments.trl import converse
from shoal.errors import TaskError
from shoal.interfaces import Model
from shoal.net.process import cores
from shoal.tasks.holdout import EVAL_SHARE, first_of, order_of, prompt, split_of
from shoal.tasks.sdk import BEGINNING, environment
from shoal.types import Json, Message, Outcome, Role, Split, Task, seed_for
from shoal.workspace.changes import Worklog
from shoal.workspace.fork import LIMITS, Workspace, fork_kind, made_in_thread, sweep
from shoal.workspace.judge import judge
from shoal.workspace.task import WorkspaceTask, opened, tasks_in
from shoal.workspace.tools import Tools

BLOCKS = (
    "You work in a folder of files. Answer with a command for bash between ```bash and ```; you see what it prints, "
    "and answer with the next one. When the task is done, answer DONE."
)
CALLS = "You work in a folder of files with tools. When the task is done, answer DONE."
_FENCE = "```"
_MOST_TRIES = 100


class WorkspaceGame(msgspec.Struct, frozen=True):
    """The reward is the share of hidden tests that turned green, and 0 when a green test turned red."""

    tasks: str = ""
    """File of tasks as JSON lines; empty for small programs with a slip."""
    turns: Annotated[int, Meta(ge=1)] = 8
    """Number of answers in one rollout."""
    fork_after: Annotated[int, Meta(ge=0)] = 0
    """Answers of a group's first rollout after which the others go on from its state; 0 has each begin for itself."""
    calls: bool = False
    """True for tool calls in the form of the model's chat template; else commands stand in blocks of text."""
    command_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that one command may take."""
    most_characters: Annotated[int, Meta(ge=100)] = 4000
    """Characters of a result that the model sees."""

    def check(self) -> None:
        """Raises `SandboxUnavailable` when this machine has no workspaces, and `TaskError` for a wrong file."""
        fork_kind()
        sweep()
        if self.fork_after >= self.turns:
            raise TaskError(f"fork_after: expected less than turns = {self.turns}, got {self.fork_after}")
        if self.fork_after and type(self).play is not WorkspaceGame.play:
            raise TaskError("fork_after: expected 0 with an agent, whose state cannot be copied")
        if self.tasks:
            _halves(self.tasks)

    def draw(self, split: Split, index: int) -> Task:
        """A task of the file, in an order that differs from epoch to epoch, or a small program."""
        if self.tasks:
            epoch, place = divmod(index, len(half := _halves(self.tasks)[split]))
            found = half[order_of(seed_for("workspace", split, epoch), len(half))[place]]
        else:
            found = _small_of(split, index)
        system = CALLS if self.calls else BLOCKS
        info: Json = {"workspace": found.id}
        return Task(f"workspace/{split}/{index}", "workspace", prompt(system, found.problem), info=json.dumps(info))

    def task_of(self, task: Task) -> WorkspaceTask:
        """The task in the workspace of a drawn one. Raises `TaskError`."""
        name = json.loads(task.info)["workspace"]
        if not self.tasks:
            return small_task(int(name.rpartition("/")[2]))
        for one in (one for half in _halves(self.tasks).values() for one in half):
            if one.id == name:
                return one
        raise TaskError(f"workspace tasks {self.tasks}: expected the task {name!r}, found none")

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Works until the model is done, then judges. Raises `SandboxUnavailable` when there is no verdict."""
        return await self.played(self.task_of(task), task.messages, model)

    async def played(self, wanted: WorkspaceTask, messages: Sequence[Message], model: Model) -> Outcome:
        """The rollout of a task; `messages` ask for it."""
        group = BEGINNING.get() if self.fork_after else None
        begun = await group[0].state() if group and not group[1] else None
        if isinstance(begun, ForkPoint):
            messages, workspace = begun.messages, await made_in_thread(begun.workspace.copy)
        else:
            workspace = await opened(wanted)
        try:
            worklog = await self.play(workspace, list(messages), model)
            if isinstance(begun, ForkPoint):
                worklog.text = f"goes on after answer {self.fork_after} of the group's first rollout\n{worklog.text}"
            verdict = await judge(workspace, wanted)
            evidence = f"{worklog.text}{verdict}".encode(errors="replace").decode()  # names of files may be no text
            return Outcome(reward=verdict.reward, evidence=evidence)
        finally:
            await asyncio.to_thread(workspace.close)

    async def play(self, workspace: Workspace, messages: list[Message], model: Model) -> Worklog:
        """Lets the model work; appends the conversation to `messages`, and returns what its commands did."""
        worklog, group = Worklog(workspace), BEGINNING.get() if self.fork_after else None
        if group and group[1]:
            await self._answers(worklog, messages, model, self.fork_after)
            if messages[-1].role is Role.ASSISTANT:
                return worklog
            copy = await made_in_thread(workspace.copy)
            group[0].reached(ForkPoint(copy, tuple(messages)), copy.close)
        given = sum(one.role is Role.ASSISTANT for one in messages)
        await self._answers(worklog, messages, model, self.turns - given)
        return worklog

    async def _answers(self, worklog: Worklog, messages: list[Message], model: Model, most: int) -> None:
        """At most so many answers; the last message is the model's once it is done."""
        limits = replace(LIMITS, wall_s=self.command_s, cpu_s=self.command_s)
        tools = Tools(worklog.workspace, limits, self.most_characters, worklog)
        if self.calls:
            await converse(model, messages, {tool.__name__: tool for tool in tools.all()}, most)
            return
        for _ in range(most):
            said = await model.answer(messages)
            messages.append(said)
            if (command := command_in(said.content)) is None:
                return
            messages.append(Message(Role.USER, await tools.bash(command) or "(it printed nothing)"))


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A spare workspace, and the conversation up to its state."""

    workspace: Workspace
    messages: tuple[Message, ...]


workspace = environment("workspace", max_running=4 * cores(), timeout_s=900.0)(WorkspaceGame)


def command_in(text: str) -> str | None:
    r"""Command in the first block of an answer; None without a block.

    >>> command_in("I look.\n```bash\nls\n```"), command_in("DONE")
    ('ls', None)
    """
    _, fence, rest = text.partition(_FENCE)
    language, line, inside = rest.partition("\n")
    if not (fence and line) or language.strip() not in ("", "bash", "sh"):
        return None
    return inside.partition(_FENCE)[0].strip("\n")


@cache
def _halves(file: str) -> dict[Split, Sequence[WorkspaceTask]]:
    """Tasks of a file by split. Raises `TaskError` when a split is empty."""
    halves: dict[Split, list[WorkspaceTask]] = {split: [] for split in Split}
    for task in tasks_in(Path(file)):
        halves[Split(task.split) if task.split else split_of(task.problem, EVAL_SHARE)].append(task)
    if empty := [split.value for split, tasks in halves.items() if not tasks]:
        raise TaskError(f"workspace tasks {file}: expected tasks to train with and held-out ones, found no {empty[0]}")
    return {split: tuple(tasks) for split, tasks in halves.items()}


def _small_of(split: Split, index: int) -> WorkspaceTask:
    """A small program of the split: the same slip in the same program never belongs to the other."""

    def drawn() -> Iterator[tuple[str, WorkspaceTask]]:
        for attempt in range(_MOST_TRIES):
            task = small_task(seed_for("workspace", split, index, attempt) % 2**40)
            yield task.sources["program.py"], task

    return first_of(split, EVAL_SHARE, drawn(), "workspace")


def small_task(seed: int) -> WorkspaceTask:
    """A right program with a slip that shows in its hidden test."""
    rng = random.Random(seed)
    return program_task(f"small/{seed}", *slipped(rng), rng)


def program_task(name: str, chosen: SmallProgram, wrong: str, rng: random.Random) -> WorkspaceTask:
    """A task whose hidden test calls a program with arguments that show its slip."""
    calls: list[list[Json]] = []
    for _ in range(_MOST_TRIES):
        calls.append([argument(rng, kind) for kind in chosen.takes])
        if len(calls) >= 5 and any(_shows(wrong, call, chosen.value(call)) for call in calls):
            break
    asserts = "".join(f"    assert f({', '.join(map(repr, call))}) == {chosen.value(call)!r}\n" for call in calls)
    test = f"from program import f\n\n\ndef test_f():\n{asserts}"
    return WorkspaceTask(
        id=name,
        problem=f"program.py has a function f that should give {chosen.what}, and does not. Mend it.",
        sources={"program.py": wrong},
        command=("python", "-m", "pytest", "-q", "test_hidden.py"),
        files={"test_hidden.py": test},
        red=("test_hidden.py::test_f",),
    )


def _shows(wrong: str, call: Sequence[Json], right: Json) -> bool:
    """Whether a slip of `PROGRAMS` shows in a call."""
    try:
        return replace(PROGRAMS[0], source=wrong).value(call) != right
    except (ArithmeticError, LookupError, NameError, TypeError, ValueError):
        return True
