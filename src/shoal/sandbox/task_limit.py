"""Limit on the processes of a program that keeps root's user id.

The kernel exempts that id from RLIMIT_NPROC, and the supervisor looks every 25 ms only: on a busy machine a fork bomb
outruns it. A control group has a limit without exemption.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
"""Where version 1 and version 2 of control groups are mounted."""
_PREFIX = "shoal-"
_EMPTY_WITHIN_S = 2.0
"""Time for the kernel to remove killed processes from their group."""


def is_exempt(uid: int) -> bool:
    """Whether a user id of this process's namespace is the machine's root."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= uid < first + count and outside + uid - first == 0 for first, outside, count in ranges)


@cache
def hierarchy() -> Path | None:
    """Folder in which this process can make groups that limit processes; None without such rights."""
    for root in _ROOTS:
        with contextlib.suppress(OSError):
            _sweep(root)
            group = _made(root, 1)
            group.rmdir()
            return root
    return None


@contextlib.contextmanager
def task_group(most: int) -> Iterator[Path | None]:
    """File that takes the number of a process to be limited, with all that it starts, to `most` processes and threads.

    None when this machine has no such limit.
    """
    root = hierarchy()
    if root is None:
        yield None
        return
    group = _made(root, most)
    try:
        yield group / "cgroup.procs"
    finally:
        _remove(group)


def _made(root: Path, most: int) -> Path:
    """A new group. Raises `OSError` where groups cannot be made, or do not limit processes."""
    group = root / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    if (controllers := root / "cgroup.subtree_control").exists() and "pids" not in controllers.read_text().split():
        _write(controllers, "+pids")
    group.mkdir()
    try:
        _write(group / "pids.max", str(most))
    except OSError:
        group.rmdir()
        raise
    return group


def _write(file: Path, text: str) -> None:
    """Writes to a file of the kernel's; one that is not there is not made."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _remove(group: Path) -> None:
    end_s = time.monotonic() + _EMPTY_WITHIN_S
    while time.monotonic() < end_s:  # what is left then, `_sweep` of a later process removes
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.005)
        else:
            return


def _sweep(root: Path) -> None:
    """Removes the groups of processes that have ended."""
    for group in root.glob(f"{_PREFIX}*-*"):
        if not Path("/proc", group.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
