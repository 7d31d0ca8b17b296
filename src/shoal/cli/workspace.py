"""`shoal workspace run`, `shell` and `mcp`: a task or a tree in a workspace, by hand."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.output import JsonFlag, show
from shoal.errors import TaskError

if TYPE_CHECKING:
    from shoal.workspace.fork import Workspace

app = typer.Typer(name="workspace", help="Work in a fork of a file tree, in the sandbox.", no_args_is_help=True)
Source = Annotated[Path, typer.Argument(metavar="TREE", help="Directory, .tar.gz, .whl, .zip or .bundle.")]
Packages = Annotated[list[str] | None, typer.Option("--package", help="Installed package for its Python; repeatable.")]


@app.command("run")
def run_task(
    file: Annotated[Path, typer.Argument(metavar="TASKS", help="File of tasks as JSON lines.")],
    task_id: Annotated[str, typer.Argument(metavar="[ID]", help="The task's id; the first task when unset.")] = "",
    agent: Annotated[str, typer.Option(help="nothing, solution, or a file of bash commands, one a line.")] = "nothing",
    json_: JsonFlag = False,
) -> None:
    """Play a task by hand and judge it; prints the difference after each command."""
    show(asyncio.run(_played(file, task_id, agent)), json_)


async def _played(file: Path, task_id: str, agent: str) -> dict[str, object]:
    from shoal.workspace.changes import Worklog
    from shoal.workspace.judge import judge
    from shoal.workspace.task import apply, opened, tasks_in
    from shoal.workspace.tools import Tools

    task = next((one for one in tasks_in(file) if task_id in ("", one.id)), None)
    if task is None:
        raise TaskError(f"workspace tasks {file}: expected the task {task_id!r}, found none")
    with await opened(task) as workspace:
        session, worklog = [], Worklog(workspace)
        if agent == "solution":
            await apply(workspace, task.solution)
            worklog.difference()
        for command in _commands(agent):
            output = await Tools(workspace).bash(command)
            session.append({"command": command, "output": output, "difference": worklog.difference()})
        verdict = await judge(workspace, task)
    tests = {name: status.value for name, status in verdict.tests.items()}
    return {
        "task": task.id,
        "session": session,
        "reward": verdict.reward,
        "tests": tests,
        "is_forged": verdict.is_forged,
    }


def _commands(agent: str) -> Iterable[str]:
    if agent in ("nothing", "solution"):
        return ()
    try:
        return Path(agent).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TaskError(f"--agent: expected nothing, solution, or a file of commands, got {error}") from None


@app.command("shell")
def shell(source: Source, package: Packages = None) -> None:
    """Type commands into a fork of a tree; prints the difference at the end."""
    from shoal.workspace.changes import Worklog
    from shoal.workspace.tools import Tools

    with _forked(source, package) as workspace, asyncio.Runner() as runner:
        while True:
            try:
                command = input("workspace$ ")
            except EOFError:
                break
            print(runner.run(Tools(workspace).bash(command)).rstrip("\n"))
        print(Worklog(workspace).difference(), end="")


@app.command("mcp")
def serve_mcp(source: Source, package: Packages = None) -> None:
    """Serve the tools of a workspace by MCP on standard input and output; needs the package mcp."""
    from shoal.workspace.tools import Tools, server

    with _forked(source, package) as workspace:
        asyncio.run(server(Tools(workspace)).run_stdio_async())


def _forked(source: Path, package: list[str] | None) -> "Workspace":
    from shoal.workspace.fork import fork
    from shoal.workspace.packages import installed
    from shoal.workspace.tree import tree_of

    return fork(tree_of(source), packages=tuple(map(installed, package or ())))
