"""Runs programs in sandboxes: on the strongest backend of this machine, found by a trial program in each."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.errors import SandboxUnavailable
from shoal.sandbox.program import Backend, Ended, Finished, Program, ProgramLimits
from shoal.sandbox.supervisor import Watch, run_on

_ADVICE = "install bubblewrap (on Debian and Ubuntu: apt install bubblewrap), or use Linux 6.2 or newer with Landlock"
_TRIAL = Program("open('file', 'w').write('x'); print(input())", stdin=b"works")
_DEFAULT = ProgramLimits()
_SHORTAGES = (
    *(os.strerror(number) for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR)),
    *("was ended from outside", "no report came", "can't start new thread"),
)
PAUSES_S = (0.1, 0.4, 1.0)
"""Seconds before another trial of a backend whose trial was not final."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Trial:
    """The result of a trial program in one backend."""

    why: str
    """Reason why the backend does not work; empty when it does."""
    is_final: bool = True
    """False if the machine was short of a resource, so that a later trial may succeed."""


_TRIALS: dict[Backend, _Trial] = {}
"""Final results of this process."""


def _trial(backend: Backend) -> _Trial:
    """The backend's result, tried again while it is not final."""
    for pause_s in (*PAUSES_S, 0.0):
        if backend not in _TRIALS:
            result = _tried(backend)
            if not result.is_final:
                time.sleep(pause_s)
                continue
            _TRIALS[backend] = result
        return _TRIALS[backend]
    return result


def _tried(backend: Backend) -> _Trial:
    """The result of one trial program."""
    if sys.platform != "linux":
        return _Trial("needs Linux")
    try:
        finished = run_on(backend, _TRIAL, ProgramLimits(wall_s=20.0))
    except (SandboxUnavailable, OSError) as error:
        return _Trial(str(error), is_final=not is_shortage(str(error)))
    if finished.stdout == b"works\n":
        return _Trial("")
    said = finished.stderr.decode(errors="replace").strip()[-300:]
    is_final = finished.ended is Ended.EXITED and not is_shortage(said)  # otherwise a limit or another process ended it
    return _Trial(f"a trial program {finished.ended.value}: {said}", is_final=is_final)


def is_shortage(why: str) -> bool:
    """True if the reason may pass: the launcher and bubblewrap say it in the kernel's words."""
    if os.strerror(errno.ENOSPC) in why:  # a machine may also allow no namespace at all
        return all(int(file.read_text()) for file in Path("/proc/sys/user").glob("max_*_namespaces"))
    return any(word in why for word in _SHORTAGES)


def why_not(backend: Backend) -> str:
    """Reason why this machine lacks a backend; empty when a program ran in it."""
    return _trial(backend).why


def probe() -> Mapping[Backend, str]:
    """Reasons (`why_not`) of every backend, strongest first."""
    return {backend: why_not(backend) for backend in Backend}


def strongest() -> Backend:
    """Strongest backend that works. Raises `SandboxUnavailable` when none works, or while one cannot be tried."""
    if (found := strongest_if_any()) is not None:
        return found
    reasons = "; ".join(f"{candidate.value}: {why}" for candidate, why in probe().items())
    raise SandboxUnavailable(f"no sandbox for untrusted programs works on this machine ({reasons}); {_ADVICE}")


def strongest_if_any() -> Backend | None:
    """Strongest backend that works; None when this machine has none.

    A shortage of resources never selects a weaker backend: a backend that could not be tried raises
    `SandboxUnavailable`.
    """
    for candidate in Backend:
        result = _trial(candidate)
        if not result.why:
            return candidate
        if not result.is_final:
            why = f"the sandbox {candidate.value} could not be tried, and may work later: {result.why}"
            raise SandboxUnavailable(why)
    return None


def in_use() -> str:
    """Name of the strongest backend that works, or `none`."""
    try:
        return strongest().value
    except SandboxUnavailable:
        return "none"


def run(program: Program, limits: ProgramLimits = _DEFAULT, backend: Backend | None = None) -> Finished:
    """Runs a program to its end, on the strongest backend unless one is named.

    Any thread may call it; it blocks. Raises `SandboxUnavailable` when this machine lacks the backend.

    >>> run(Program("print(6 * 7)")).stdout
    b'42\\n'
    """
    return run_on(backend or strongest(), program, limits)


async def run_async(
    program: Program,
    limits: ProgramLimits = _DEFAULT,
    backend: Backend | None = None,
    channel: socket.socket | None = None,
    pair: list[Watch] | None = None,
) -> Finished:
    """Runs a program in a thread; after a cancellation the program is gone before this returns.

    For `channel` and `pair` see `run_on`.
    """

    def work() -> Finished:
        return run_on(backend or strongest(), program, limits, stop, channel, pair)

    with contextlib.ExitStack() as stack:
        try:
            stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise SandboxUnavailable(f"no sandbox could be started: {error}") from None
        stack.callback(os.close, stop)
        running = in_thread(work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            os.eventfd_write(stop, 1)
            await asyncio.wait([running])
            raise


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The work in a new thread, so that it does not block asyncio's pool. Raises `SandboxUnavailable`."""
    thread = ThreadPoolExecutor(1, "sandbox")
    try:
        return asyncio.get_running_loop().run_in_executor(thread, work)
    except (OSError, RuntimeError) as error:  # no memory, no thread
        raise SandboxUnavailable(f"no sandbox could be started: {error}") from None
    finally:
        thread.shutdown(wait=False)
