"""Tasks in a workspace: a tree, a problem, hidden tests and perhaps a solution; read from JSON lines."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from shoal.errors import TaskError
from shoal.workspace.fork import Workspace, fork, held, made_in_thread
from shoal.workspace.judge import HiddenTests
from shoal.workspace.packages import installed
from shoal.workspace.tree import PLACE, Tree, prepare_as, prepared_as, tree_named, tree_of


class WorkspaceTask(HiddenTests, frozen=True, kw_only=True):
    """One task with its hidden tests; paths are relative to the file that it stands in."""

    id: str
    problem: str
    tree: str = ""
    """Path of what `tree_of` takes, or the digest of a prepared tree."""
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Files of the tree by path, in place of `tree`."""
    place: str = PLACE
    patch: str = ""
    """Difference that is applied to the tree before an agent sees it, as one that plants a fault."""
    solution: str = ""
    """Difference that solves the task; agents never see it, and so no `.git` either."""
    packages: tuple[str, ...] = ("pytest",)
    """Installed packages that Python imports in the workspace."""
    split: str = ""
    """`train` or `eval`; empty leaves it to the share of held-out questions."""


def tasks_in(file: Path) -> Sequence[WorkspaceTask]:
    """Tasks in a file of JSON lines. Raises `TaskError` that names the line."""
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"workspace tasks {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            task = msgspec.json.decode(line, type=WorkspaceTask)
        except msgspec.MsgspecError as error:
            raise TaskError(f"workspace tasks {file}, line {number}: {error}") from None
        path = (file.parent / task.tree).resolve()
        found.append(msgspec.structs.replace(task, tree=str(path)) if task.tree and path.exists() else task)
    if not found:
        raise TaskError(f"workspace tasks {file}: expected a task on each line, found none")
    return found


async def opened(task: WorkspaceTask) -> Workspace:
    """A workspace as an agent finds it. Raises `TaskError` and `SandboxUnavailable`."""
    tree = await asyncio.to_thread(prepared_tree, task)
    packages = await asyncio.to_thread(lambda: tuple(map(installed, task.packages)))
    has_history = bool(task.solution) and await asyncio.to_thread(os.path.lexists, tree.base / ".git")
    tree = await patched(tree, task.patch) if task.patch or has_history else tree
    return await made_in_thread(partial(fork, tree, packages=packages))


def prepared_tree(task: WorkspaceTask) -> Tree:
    """The tree of a task, before its patch. Raises `TaskError`."""
    if task.tree:
        source = Path(task.tree)
        return tree_of(source, place=task.place) if source.exists() else tree_named(task.tree)
    with tempfile.TemporaryDirectory() as made:
        for name, text in task.sources.items():
            target = Path(made, name)
            if not target.is_relative_to(made) or ".." in target.parts:
                raise TaskError(f"workspace task {task.id}: expected a path inside of the tree, got {name!r}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return tree_of(Path(made), place=task.place)


async def patched(tree: Tree, patch: str) -> Tree:
    """The tree with a difference, made once in a workspace, and without git's history, which shows the solution.

    Raises `TaskError` and `SandboxUnavailable`.
    """
    key = f"{tree.digest} without history {patch}"
    if (known := prepared_as(key)) is None:
        async with held(partial(fork, tree)) as workspace:
            if patch:
                await apply(workspace, patch)
            if not (removed := await workspace.run_program(("/usr/bin/env", "rm", "-rf", ".git"))).ok:
                raise TaskError(
                    f"workspace tree {tree.digest[:16]}: its .git cannot be removed: {removed.stderr!r:.300}"
                )
            known = await asyncio.to_thread(lambda: prepare_as(key, workspace.snapshot()))
    return known


async def apply(workspace: Workspace, patch: str) -> None:
    """Applies a difference to a workspace. Raises `TaskError` when it does not fit."""
    command = ("/usr/bin/env", "git", "apply", "--whitespace=nowarn", "-")
    finished = await workspace.run_program(command, stdin=patch.encode())
    if not finished.ok:
        raise TaskError(f"workspace patch: it does not fit the tree: {finished.stderr.decode(errors='replace')[-300:]}")
