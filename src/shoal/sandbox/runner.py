"""Runner of programs on the strongest sandbox of this machine."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.errors import SandboxUnavailable
from shoal.sandbox import backends
from shoal.sandbox.command import WORK_FOLDER, boxed, environment_of, interpreter, other_uid, visible
from shoal.sandbox.launch_spec import NONE, LaunchSpec
from shoal.sandbox.program import Backend, Finished, Program, ProgramLimits
from shoal.sandbox.supervisor import run_on

_DEFAULT = ProgramLimits()
_FOLDER_BYTES = 16 << 20


def run(program: Program, limits: ProgramLimits = _DEFAULT, backend: Backend | None = None) -> Finished:
    """Runs a program to its end, on the strongest backend unless one is named.

    Any thread may call it; it blocks. Raises `SandboxUnavailable` when this machine lacks the backend.

    >>> run(Program("print(6 * 7)")).stdout
    b'42\\n'
    """
    return run_on(backends.backend() if backend is None else backend, program, limits)


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
        return run_on(backends.backend() if backend is None else backend, program, limits, stop, channel)

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


def confined(
    module: str,
    arguments: Sequence[str],
    *,
    backend: Backend,
    memory_bytes: int,
    open_files: int,
    packages: Sequence[Path],
    environment: Mapping[str, str],
) -> list[str]:
    """Command that runs a module of Shoal in a sandbox with namespaces, for as long as its parent wants.

    The module keeps the descriptors it inherits, and `WORK_FOLDER` is an empty folder. The parent enforces its time and
    kills its whole process group. A sandbox that cannot be set up ends with code 1 and reports the reason on standard
    error.
    """
    assert backend is not Backend.LANDLOCK, "it has no folder of its own to be given"
    spec = LaunchSpec(
        backend=backend,
        argv=[interpreter(), "-s", "-S", "-B", "-P", "-m", module, *arguments],
        environment=environment_of(environment, packages),
        readable=visible(*packages),
        folder=WORK_FOLDER,
        uid=other_uid(),
        status_fd=NONE,
        files_fd=NONE,
        cpu_s=0,
        memory_bytes=memory_bytes,
        processes=0,
        file_bytes=_FOLDER_BYTES,
        open_files=open_files,
    )
    return boxed(spec)
