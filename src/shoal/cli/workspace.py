"""`shoal workspace run`, `shell` and `mcp`: a task or a tree in a workspace, by hand; `serve`: for a run."""

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.output import JsonFlag, show, until_stopped
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


@app.command("serve")
def serve(
    run: Annotated[str, typer.Option(metavar="RUN_URL", help="The run's address, http://HOST:PORT.")],
    max_running: Annotated[int, typer.Option(min=0, help="Rollouts at once; 4 per core when 0.")] = 0,
) -> None:
    """Play rollouts of a run in workspaces of this host, until stopped.

    SHOAL_RUN_TOKEN is the run's token.
    """
    from shoal.cluster.workspaces_role import serve_workspaces
    from shoal.net.client import TOKEN_VARIABLE
    from shoal.net.process import cores

    token, most = os.environ.get(TOKEN_VARIABLE, ""), max_running or 4 * cores()
    until_stopped(serve_workspaces(run.rstrip("/"), token, most, partial(print, flush=True)))


def _forked(source: Path, package: list[str] | None) -> "Workspace":
    from shoal.workspace.fork import fork
    from shoal.workspace.packages import installed
    from shoal.workspace.tree import tree_of

    return fork(tree_of(source), packages=tuple(map(installed, package or ())))
