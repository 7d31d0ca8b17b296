"""What runs in a workspace reaches neither outcome, token, hidden tests nor another workspace, in each backend."""

import asyncio
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile_workspaces import CHANGING, LIVING, REACHING, READING, SECRET, Attempt, changing, reading
from shoal.sandbox.program import Backend, ProgramLimits
from shoal.sandbox.runner import why_not
from shoal.workspace.fork import ForkKind, Workspace, fork
from shoal.workspace.tree import Tree

pytest_plugins = ("small_workspaces",)
LIMITS = ProgramLimits(wall_s=120.0, cpu_s=60.0, memory_bytes=1 << 30, processes=64, output_bytes=8 << 20)
TARGETS = ("the outcome", "the token", "the hidden tests", "another workspace")


@pytest.fixture(
    params=[(ForkKind.OVERLAY, Backend.NAMESPACES), (ForkKind.COPY, Backend.BUBBLEWRAP)], ids=lambda one: one[1]
)
def workspace(request: pytest.FixtureRequest, tree: Tree) -> Iterator[Workspace]:
    kind, backend = request.param
    if why := why_not(backend):
        pytest.skip(f"{backend.value}: {why}")
    with fork(tree, kind) as made:
        assert made.backend is backend
        yield made


def path_of(target: str, folder: Path, other: Workspace) -> Path:
    """A file outside with a secret: beside the trees for what Shoal keeps, or inside of another fork."""
    place = other.own / "workspace" if target == "another workspace" else folder
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{target.replace(' ', '_')}.json"
    path.write_text(f"{SECRET}{target.replace(' ', '_')}")
    return path


def ran(workspace: Workspace, attempts: list[Attempt], limits: ProgramLimits = LIMITS) -> dict[str, str]:
    """Output of each attempt; all run in one sandbox, each in a shell and a folder of its own."""
    parts = [f"mkdir -p ~/{n}; (cd ~/{n}; {one.command}) 2>&1; echo; echo '<<{n}>>'" for n, one in enumerate(attempts)]
    said = asyncio.run(workspace.run("\n".join(parts), limits)).stdout.decode(errors="replace")
    outputs = re.split(r"<<\d+>>\n", said)
    assert len(outputs) == len(attempts) + 1, said[-500:]
    return {one.name: output for one, output in zip(attempts, outputs, strict=False)}


def test_there_are_more_than_fifty_attempts() -> None:
    assert len(TARGETS) * (len(READING) + len(CHANGING)) + len(LIVING) + len(REACHING) >= 100
    assert len(READING) + len(CHANGING) + len(LIVING) + len(REACHING) >= 40


def test_nothing_outside_is_read_or_changed(workspace: Workspace, tree: Tree, tmp_path: Path) -> None:
    with fork(tree, workspace.kind) as other:
        paths = {target: path_of(target, tmp_path, other) for target in TARGETS}
        attempts = [
            one for target, path in paths.items() for one in (*reading(target, str(path)), *changing(target, str(path)))
        ]
        outputs = ran(workspace, attempts)
        leaked = [name for name, output in outputs.items() if SECRET in output]
        assert leaked == []
        for target, path in paths.items():
            assert path.read_text() == f"{SECRET}{target.replace(' ', '_')}"
        assert (tree.base / "sums.py").read_text().endswith("a - b\n")


@pytest.mark.parametrize("name", LIVING)
def test_nothing_outlives_its_command(name: str, workspace: Workspace) -> None:
    mark = f"8000.{os.getpid()}"
    asyncio.run(
        workspace.run(LIVING[name].format(mark=mark), ProgramLimits(wall_s=3.0, processes=64, memory_bytes=1 << 30))
    )
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in command_line(pid)] == []


def command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_no_server_process_or_kernel_object_outside_is_reached(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", f"{SECRET}x")
    name, began = socket.gethostname(), os.stat("/proc/self").st_ctime
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        abstract.bind(f"\0shoal-{port}")
        abstract.listen()
        server.setblocking(False)
        abstract.setblocking(False)
        facts = {"port": port, "pid": os.getpid(), "secret": SECRET}
        for way, command in REACHING.items():
            output = asyncio.run(workspace.run(command.format(**facts), LIMITS)).stdout.decode(errors="replace")
            assert SECRET not in output, way
        for listening in (server, abstract):
            with pytest.raises(BlockingIOError):
                listening.accept()
    assert socket.gethostname() == name
    assert os.stat("/proc/self").st_ctime >= began


def test_an_agent_makes_no_whiteout_and_no_redirect_in_its_layer(tree: Tree) -> None:
    with fork(tree) as workspace:
        if workspace.kind is not ForkKind.OVERLAY:
            pytest.skip(f"this machine forks by {workspace.kind}")
        tricks = (
            "import os, stat\nfor trick in (lambda: os.mknod('new', stat.S_IFCHR, 0), lambda: os.setxattr('tests', "
            "'user.overlay.opaque', b'y'), lambda: os.setxattr('tests', 'user.overlay.redirect', b'/')):\n"
            "    try:\n        trick()\n    except OSError:\n        pass\n"
        )
        asyncio.run(workspace.run_program(("python", "-c", tricks)))
        for path in workspace.own.rglob("*"):
            assert not path.is_char_device()
            marks = {"user.overlay.opaque", "user.overlay.redirect", "user.overlay.metacopy"}
            assert not marks & set(os.listxattr(path, follow_symlinks=False))
