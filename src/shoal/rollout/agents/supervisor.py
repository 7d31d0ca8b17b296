"""Runs one agent's command and ends with its exit code, once nothing that it started is left.

    python supervisor.py PARENT_PID COMMAND ARGUMENTS...

As root the command is the first process of a PID namespace, and the kernel ends the others with it. Elsewhere this
process adopts what loses its parent (prctl(2), PR_SET_CHILD_SUBREAPER), and kills all its descendants: one that kills
this process first can escape. On systems other than Linux only the command's process group is killed.

A file that is run by its path, and imports nothing of Shoal: there is one for each rollout.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
CANNOT_BE_STARTED = 127
END_S, POLL_S = 3.0, 0.005
LINUX = sys.platform == "linux"


def _asked_to_end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _become_keeper(parent: int) -> bool:
    """Prepares this process, and returns whether the next child begins its own PID namespace."""
    if not LINUX:
        return False
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        raise SystemExit(1)
    return os.geteuid() == 0 and libc.unshare(CLONE_NEWNS | CLONE_NEWPID) == 0


def _run(command: Sequence[str], *, in_namespace: bool) -> NoReturn:
    """Becomes the command."""
    try:
        os.setsid()
        if LINUX:
            libc = ctypes.CDLL(None)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if in_namespace:  # what reads /proc is to see the namespace; where it may not be mounted it sees all
                libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
                libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        for number in (signal.SIGPIPE, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]!r} cannot be started: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_BE_STARTED)


def _descendants() -> list[int]:
    """Processes below this process that are no zombies, by one look at /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b") ")[2].split(b" ", 2)[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _end_all(command: int) -> None:
    """Kills what is left, and waits until there is nothing; for `END_S` at most, since some may not be killed by us."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(command, signal.SIGKILL)
    ends_s = time.monotonic() + END_S
    while LINUX and time.monotonic() < ends_s:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        # What a killed one leaves behind becomes a child of this process, and is there at the next look.
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def main(parent: int, command: Sequence[str]) -> int:
    """Runs the command; its exit code, or 128 and the signal that ended it."""
    in_namespace = _become_keeper(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is something to end
    signal.signal(signal.SIGTERM, _asked_to_end)
    child = os.fork()
    if not child:
        _run(command, in_namespace=in_namespace)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return 128 - code if code < 0 else code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all(child)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
