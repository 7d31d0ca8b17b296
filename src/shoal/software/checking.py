"""Both checks of a software task: its solution solves it, and doing nothing does not."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.files import replaced
from shoal.software.formats import oracle, tasks_of
from shoal.workspace.fork import Workspace
from shoal.workspace.judge import judge
from shoal.workspace.task import WorkspaceTask, apply, opened


@dataclass(frozen=True, slots=True)
class Checked:
    """Rewards of doing nothing and of the solution, and how long a verdict takes."""

    nothing: float
    solution: float
    verdict_s: float

    @property
    def is_sound(self) -> bool:
        """Whether only the solution gets marks."""
        return self.nothing == 0.0 and self.solution == 1.0


async def checked(task: WorkspaceTask, script: str = "") -> Checked:
    """Judges a task twice; `script` solves it in bash where the task has no difference that does.

    Raises `TaskError` and `SandboxUnavailable`.
    """

    async def solve(workspace: Workspace) -> None:
        if script:
            await workspace.run(script)
        else:
            await apply(workspace, task.solution)

    nothing, _ = await _judged(task, None)
    solution, verdict_s = await _judged(task, solve)
    return Checked(nothing, solution, verdict_s)


def read(source: Path, out: Path, trees: Path | None, check: int) -> dict[str, object]:
    """Writes the tasks of a source to a file, judges some of them, and returns numbers.

    Raises `TaskError` and `SandboxUnavailable`.
    """
    tasks = list(tasks_of(source, trees))
    with replaced(out) as unfinished:
        unfinished.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    step = max(1, len(tasks) // check) if check else 1
    chosen = tasks[::step][:check]
    results = [asyncio.run(checked(task, "" if task.solution else oracle_of(source, task))) for task in chosen]
    numbers: dict[str, object] = {"tasks": len(tasks), "file": str(out)}
    if results:
        seconds = sorted(one.verdict_s for one in results)
        sound = sum(one.is_sound for one in results)
        solved = sum(one.solution == 1.0 for one in results)
        idle = sum(one.nothing == 0.0 for one in results)
        numbers |= {"checked": len(results), "sound": sound, "solved": solved, "nothing_is_0": idle}
        numbers |= {"verdict_s_median": statistics.median(seconds), "verdict_s_most": seconds[-1]}
    return numbers


def oracle_of(source: Path, task: WorkspaceTask) -> str:
    """The script that solves a task of a source."""
    return oracle(source if source.name == task.id else source / task.id)


async def _judged(task: WorkspaceTask, work: Callable[[Workspace], Awaitable[None]] | None) -> tuple[float, float]:
    with await opened(task) as workspace:
        if work:
            await work(workspace)
        began = time.monotonic()
        verdict = await judge(workspace, task)
        return verdict.reward, time.monotonic() - began
