"""Runs programs in sandboxes: on the strongest backend of this machine, found by a trial program in each."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from shoal.errors import SandboxUnavailable
from shoal.sandbox.program import Backend, Finished, Program, ProgramLimits
from shoal.sandbox.supervisor import run_on

_ADVICE = "install bubblewrap (on Debian and Ubuntu: apt install bubblewrap), or use Linux 6.2 or newer with Landlock"
_TRIAL = Program("open('file', 'w').write('x'); print(input())", stdin=b"works")
_DEFAULT = ProgramLimits()


@cache
def why_not(backend: Backend) -> str:
    """Reason why this machine lacks a backend; empty when a program ran in it."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        finished = run_on(backend, _TRIAL, ProgramLimits(wall_s=20.0))
    except (SandboxUnavailable, OSError) as error:
        return str(error)
    if finished.stdout != b"works\n":
        return f"a trial program {finished.ended.value}: {finished.stderr.decode(errors='replace').strip()[-300:]}"
    return ""


def probe() -> Mapping[Backend, str]:
    """Reasons (`why_not`) of every backend, strongest first."""
    return {backend: why_not(backend) for backend in Backend}


def strongest() -> Backend:
    """Strongest backend that works. Raises `SandboxUnavailable` when none works."""
    for candidate in Backend:
        if not why_not(candidate):
            return candidate
    found = "; ".join(f"{candidate.value}: {why}" for candidate, why in probe().items())
    raise SandboxUnavailable(f"no sandbox for untrusted programs works on this machine ({found}); {_ADVICE}")


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
) -> Finished:
    """Runs a program in a thread of its own; after a cancellation the program is gone before this returns.

    A `channel` becomes the program's standard input, and is closed here.
    """

    def work() -> Finished:
        return run_on(backend or strongest(), program, limits, stop, channel)

    with contextlib.ExitStack() as stack:
        try:
            stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, stop)
            thread = ThreadPoolExecutor(1, "sandbox")  # not asyncio's pool, where others would wait for this program
            stack.callback(thread.shutdown, wait=False)
            running = asyncio.get_running_loop().run_in_executor(thread, work)
        except (OSError, RuntimeError) as error:  # no descriptor, no thread
            raise SandboxUnavailable(f"no sandbox could be started: {error}") from None
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            os.eventfd_write(stop, 1)
            await asyncio.wait([running])
            raise
