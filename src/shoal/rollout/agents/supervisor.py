"""Runs one agent's command and ends with its exit code, once nothing that it started is left.

    python -m shoal.rollout.agents.supervisor PARENT_PID BOX COMMAND ARGUMENTS...

BOX is empty for a command that says its own reward. Else the command runs the model's commands too, and BOX has, as
JSON, the paths that they read and the folder in which they write.
As root the command is the first process of a PID namespace, and the kernel ends the others with it. Elsewhere this
process adopts what loses its parent (prctl(2), PR_SET_CHILD_SUBREAPER), and kills all its descendants: one that kills
this process first can escape. On systems other than Linux a daemon can escape as well.

There is one such process for each rollout, so it imports little.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import psutil

from shoal.sandbox import files, kernel, seccomp

PR_SET_CHILD_SUBREAPER, MS_NOEXEC = 36, 8
CLONE_NEWNS, CLONE_NEWPID = 0x0002_0000, 0x2000_0000
CANNOT_BE_STARTED = 127
END_S, POLL_S = 3.0, 0.005
LINUX = sys.platform == "linux"


def _asked_to_end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _become_keeper(parent: int) -> bool:
    """Prepares this process, and returns whether the next child begins its own PID namespace."""
    if not LINUX:
        return False
    kernel.control(PR_SET_CHILD_SUBREAPER, 1)
    kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        raise SystemExit(1)
    with contextlib.suppress(OSError):  # only root may
        kernel.unshare(CLONE_NEWPID)
        return True
    return False


def _run(command: Sequence[str], box: str, *, in_namespace: bool) -> NoReturn:
    """Becomes the command."""
    try:
        os.setsid()
        if LINUX:
            kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if in_namespace:
            with contextlib.suppress(OSError):  # where /proc may not be mounted, its readers see all processes
                kernel.unshare(CLONE_NEWNS)
                kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
                kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | MS_NOEXEC)
        for number in (signal.SIGPIPE, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if box:
            _enter(*json.loads(box))
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]!r} cannot be started: {error.strerror or error}\n".encode())
    finally:
        os._exit(CANNOT_BE_STARTED)


def _enter(readable: list[str], listed: list[str], folder: str) -> None:
    """Puts this process and its descendants into the box of `box.readable`. Raises `OSError`."""
    os.chdir(folder)
    kernel.drop_capabilities()
    files.restrict(readable, folder, listed=listed, network=True)
    kernel.install_filter(seccomp.agent_filter(kernel.MACHINE))


def _end_all(command: int) -> None:
    """Kills what is left, and waits until there is nothing; for `END_S` at most, since some may not be killed by us."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(command, signal.SIGKILL)
    ends_s = time.monotonic() + END_S
    # What a killed one leaves behind becomes a child of this process, and is there at the next look.
    while time.monotonic() < ends_s and (left := psutil.Process().children(recursive=True)):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=POLL_S)


def main(parent: int, box: str, command: Sequence[str]) -> int:
    """Runs the command; its exit code, or 128 and the signal that ended it."""
    in_namespace = _become_keeper(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is something to end
    signal.signal(signal.SIGTERM, _asked_to_end)
    child = os.fork()
    if not child:
        _run(command, box, in_namespace=in_namespace)
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
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
