"""Workspaces: forks of a prepared tree, copy-on-write, in which commands run in the sandbox.

Each command is a sandbox by itself: when it ends, all of its processes have ended. A shell's directory, variables and
functions go on to the next command through a file, so between commands a workspace is files only. It costs no
process, thread or mount, and a snapshot misses nothing.
"""

import asyncio
import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Self

from shoal.errors import SandboxUnavailable, TaskError
from shoal.sandbox.command import interpreter
from shoal.sandbox.program import Backend, Finished, Program, ProgramLimits, WorkTree
from shoal.sandbox.runner import in_thread, run, run_async, strongest
from shoal.sandbox.usage import remove_tree
from shoal.workspace.tree import Tree, kept, trees_directory, unfinished

HOME = "/shoal-home"
LIMITS = ProgramLimits(
    wall_s=60.0, cpu_s=60.0, memory_bytes=1 << 30, processes=64, output_bytes=1 << 20, file_bytes=256 << 20
)
"""Limits of one command; files count together from the workspace's begin."""
_IMAGE_PATH = "/opt/miniconda3/envs/testbed/bin"
"""Environment of the tests in images of SWE-bench and SWE-smith, which a shell of theirs activates."""
_STATE = f"{HOME}/.shell"
_SHELL = (
    f"exec 2>&1; [ -f {_STATE} ] && . {_STATE} >/dev/null 2>&1; "
    f'trap \'code=$?; {{ declare -p; declare -f; alias -p; printf "cd %q\\n" "$PWD"; }} >{_STATE} 2>/dev/null; '
    'exit $code\' EXIT; shopt -s expand_aliases; eval "$1"'
)
"""A shell that begins where the one before ended, and keeps its directory, variables, functions and aliases."""


class ForkKind(StrEnum):
    """Ways to fork a tree, the fastest first.

    A command that writes to a hard link changes the tree itself, so hard links are not used.
    """

    OVERLAY = "overlay"
    """overlayfs in a user namespace: nothing is copied, and the mount is gone with each command."""
    REFLINK = "reflink"
    """Copies that share their blocks, on btrfs, XFS and the like."""
    COPY = "copy"
    """Plain copies: seconds for thousands of files."""


@cache
def fork_kind() -> ForkKind:
    """Fastest way of this machine. Raises `SandboxUnavailable` when its sandbox has no work trees."""
    if strongest() is Backend.LANDLOCK:
        raise SandboxUnavailable("workspaces need the sandbox bubblewrap or namespaces, this machine has landlock only")
    folder = new_folder()
    try:
        for name in ("base/tmp", "upper", "work"):
            (folder / name).mkdir(parents=True)
        tree = WorkTree(folder, ("tmp",), "/tmp", (folder / "base",))
        if run(Program("open('file', 'w')", tree=tree), backend=Backend.NAMESPACES).ok:
            return ForkKind.OVERLAY
    except SandboxUnavailable:
        pass
    finally:
        remove_tree(str(folder))
    folder = new_folder()
    try:
        (folder / "file").write_bytes(b"x")
        return ForkKind.REFLINK if copied(folder / "file", folder / "copy", "always") else ForkKind.COPY
    finally:
        remove_tree(str(folder))


def copied(source: Path, target: Path, reflink: str) -> bool:
    """Whether a file or folder was copied with all that belongs to it; `reflink` is as for cp."""
    command = ["cp", "-aT", f"--reflink={reflink}", "--", str(source), str(target)]
    if subprocess.run(command, check=False, capture_output=True).returncode == 0:
        return True
    if os.getuid() == 0 or shutil.which("unshare") is None:
        return False
    # Its owner may not read a file of mode 000; root of a user namespace may.
    return subprocess.run(["unshare", "-r", *command], check=False, capture_output=True).returncode == 0


def new_folder() -> Path:
    """New folder of a fork; its name has the process that owns it, so that `sweep` finds what a killed one left."""
    folder = trees_directory() / "forks" / f"{_owner(trees_directory() / 'owners')}-{secrets.token_hex(8)}"
    folder.mkdir(parents=True)
    return folder


@cache
def _owner(locks: Path) -> str:
    """Name of this process among all that share the cache, also from other hosts and containers; it holds a lock."""
    locks.mkdir(parents=True, exist_ok=True)
    while True:
        lock = locks / f"{secrets.token_hex(8)}.lock"
        held = os.open(lock, os.O_CREAT | os.O_WRONLY)  # as long as the process lives
        fcntl.flock(held, fcntl.LOCK_EX)
        if lock.exists():  # else another process swept it before it was locked
            return lock.stem


def sweep() -> int:
    """Removes the forks of processes that have ended; returns their number."""
    removed = 0
    for lock in (trees_directory() / "owners").glob("*.lock"):
        with suppress(OSError), lock.open() as file:  # its owner lives, or another process sweeps as well
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in (trees_directory() / "forks").glob(f"{lock.stem}-*"):
                remove_tree(str(folder))
                removed += 1
            lock.unlink()
    return removed


def fork(tree: Tree, kind: ForkKind | None = None, *, packages: tuple[Path, ...] = ()) -> "Workspace":
    """A new workspace. `packages` are folders that its Python imports from, such as `packages.installed("pytest")`.

    Raises `SandboxUnavailable`, and `TaskError` for a tree that cannot be copied.
    """
    kind = kind or fork_kind()
    folder = new_folder()
    if kind is ForkKind.OVERLAY:
        (folder / "work").mkdir()
        (folder / "upper").mkdir()
    else:
        own = folder / "tree"
        if len(tree.layers) > 1:
            remove_tree(str(folder))
            raise TaskError(
                f"workspace {tree.digest[:16]}: its layers need overlayfs, this machine forks by {kind.value}"
            )
        if not copied(tree.layers[0], own, "always" if kind is ForkKind.REFLINK else "never"):
            remove_tree(str(folder))
            raise TaskError(f"workspace {tree.digest[:16]}: its files could not be copied by {kind.value}")
    return Workspace(tree, folder, kind, packages)


@asynccontextmanager
async def held(make: Callable[[], "Workspace"]) -> AsyncIterator["Workspace"]:
    """A workspace that is made, and removed after the block, in threads: some machines copy all files."""
    workspace = await made_in_thread(make)
    try:
        yield workspace
    finally:
        await asyncio.to_thread(workspace.close)


async def made_in_thread(make: Callable[[], "Workspace"]) -> "Workspace":
    """A workspace that is made in a thread; after a cancellation it is removed. Raises `SandboxUnavailable`."""
    making = in_thread(make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if not making.exception():
            making.result().close()
        raise


@cache
def _commands() -> Path:
    """Folder with `python` and `python3`, which the machine may have under other names only."""
    folder = trees_directory() / "bin" / hashlib.blake2b(interpreter().encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3"):
        with suppress(FileExistsError):
            (folder / name).symlink_to(interpreter())
    return folder


@dataclass(eq=False, slots=True)
class Workspace:
    """A fork of a tree, as a context manager; leaving it removes the fork. Commands take turns.

    >>> from shoal.workspace.tree import tree_of
    >>> import asyncio, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as made:
    ...     _ = (pathlib.Path(made) / "greeting").write_text("hello")
    ...     with fork(tree_of(pathlib.Path(made))) as workspace:
    ...         asyncio.run(workspace.run("cat greeting")).stdout
    b'hello'
    """

    tree: Tree
    folder: Path
    kind: ForkKind
    packages: tuple[Path, ...] = ()
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def own(self) -> Path:
        """Folder of the host with what is this workspace's own: its changes, or under copies all files."""
        return self.folder / ("upper" if self.kind is ForkKind.OVERLAY else "tree")

    @property
    def backend(self) -> Backend:
        """Sandbox backend of its commands; bubblewrap starts this machine's Python, which a system's root lacks."""
        return Backend.NAMESPACES if self.kind is ForkKind.OVERLAY or self.tree.has_system else strongest()

    @property
    def work_tree(self) -> WorkTree:
        """The tree as the sandbox mounts it."""
        tree, place = self.tree, self.tree.place
        if self.kind is ForkKind.OVERLAY:
            return WorkTree(self.folder, tree.tops, place, tree.layers, has_system=tree.has_system)
        return WorkTree(self.own, tree.tops, place, (), tree.size_bytes, tree.files, tree.has_system)

    async def run(self, command: str, limits: ProgramLimits = LIMITS) -> Finished:
        """Runs a bash command, where the one before has left the shell; standard output has standard error as well.

        Raises `SandboxUnavailable` when the sandbox failed or was ended from outside.
        """
        return await self.run_program(("/bin/bash", "--norc", "-c", _SHELL, "bash", command), limits)

    async def run_program(
        self,
        argv: tuple[str, ...],
        limits: ProgramLimits = LIMITS,
        environment: dict[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Finished:
        """Runs a program in the tree's folder; "python" is this Python, or the system's of a tree that has one.

        Raises `SandboxUnavailable`.
        """
        packages, first = (_commands(), *self.packages), str(_commands())
        if self.tree.has_system:
            packages, first = self.packages, _IMAGE_PATH
            argv = ("/usr/bin/env", "python3", *argv[1:]) if argv[0] == "python" else argv
        variables = {
            "PATH": f"{first}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": HOME,
            "TMPDIR": f"{HOME}/tmp",
            "USER": "agent",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        }
        program = Program(argv=argv, stdin=stdin, packages=packages, environment=variables, tree=self.work_tree)
        async with self.turn:
            return await run_async(program, limits, self.backend)

    def snapshot(self) -> Tree:
        """The workspace as it is now, as a tree that can be forked; call it between commands. Raises `OSError`."""
        with unfinished() as layer:
            layer.rmdir()
            if not copied(self.own, layer, "auto"):
                raise OSError(f"the snapshot of {self.own} could not be written")
            below = self.tree if self.kind is ForkKind.OVERLAY else None
            return kept(layer, self.tree.place, has_system=self.tree.has_system, below=below)

    def copy(self) -> "Workspace":
        """Another workspace in this one's state; call it between commands. Raises `OSError`."""
        folder = new_folder()
        if self.kind is ForkKind.OVERLAY:
            (folder / "work").mkdir()
        other = Workspace(self.tree, folder, self.kind, self.packages)
        if not copied(self.own, other.own, "auto"):
            other.close()
            raise OSError(f"the workspace {self.own} could not be copied")
        return other

    def close(self) -> None:
        """Removes the fork."""
        if self.folder.is_dir():
            remove_tree(str(self.folder))
