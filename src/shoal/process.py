"""Child processes: spawned, in process groups of their own, and dead when their parent is.

A child is `python -m module ...`. It never shares memory that was touched by torch, its standard output and error go to
a log file, and one socket joins it to its parent: length-prefixed frames of `shoal.wire`, or just the line in which a
server announces its port.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shoal.errors import ChildDied

PR_SET_PDEATHSIG = 1
PARENT = "SHOAL_PARENT_PID"
FRAME_HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30
GRACE_S = 5.0


def cores() -> int:
    """How many this process may use; where the system does not tell, how many there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends; called first thing in a child (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = int(os.environ.pop(PARENT, os.getppid()))  # taken out, so that this process's own children do not read it
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os._exit(1)


def collect_rarely() -> None:
    """For a process whose event loop must not stand still: looks for cyclic garbage only after much has piled up.

    By default Python looks at everything that a request leaves behind, every id of every token, again and again. With
    a thousand conversations open that stops the loop for 2.5 % of the time, in pieces of 20 to 100 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def torch_environment(threads: int) -> dict[str, str]:
    """The environment of a process that computes with torch on `threads` cores.

    Idle OpenMP threads sleep instead of spinning (spinning collapses when processes share cores), and glibc keeps the
    memory it frees instead of giving it back to the kernel, which would have to clear it again for the next tensor.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended."""

    name: str
    returncode: int
    last_words: str

    def __str__(self) -> str:
        how = f"signal {-self.returncode}" if self.returncode < 0 else f"code {self.returncode}"
        return f"the {self.name} process ended with {how}" + (f": {self.last_words}" if self.last_words else "")


class Child:
    """One running child and the socket to it. Use as an async context manager; leaving it ends the child."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Entering starts `python -m module arguments... --fd N`, where N is the child's end of the socket."""
        self.name = name
        self._module = module
        self._arguments = tuple(arguments)
        self._log = log
        self._env = dict(env)
        self._turn = asyncio.Lock()

    def command(self, fd: int) -> list[str]:
        """What is run; descriptor `fd` is the child's end of the socket."""
        return [sys.executable, "-m", self._module, *self._arguments, "--fd", str(fd)]

    async def __aenter__(self) -> "Child":
        ours, theirs = socket.socketpair()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as output:
            self._log_begins_at = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._env, PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_FRAME_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    async def line(self, timeout_s: float) -> bytes:
        """One line from the child. Raises `ChildDied` when it ends or stays silent for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError:
            log = self._last_words() or "nothing"
            raise ChildDied(
                f"the {self.name} process was not ready in {timeout_s:.0f} s; its log ends: {log}"
            ) from None
        if not line.endswith(b"\n"):
            raise ChildDied(str(await self.died()))
        return line

    async def ask(self, frame: bytes) -> bytes:
        """Sends one frame and returns the answer; callers take turns. Raises `ChildDied`."""
        async with self._turn:
            try:
                self._writer.write(FRAME_HEADER.pack(len(frame)) + frame)
                await self._writer.drain()
                (size,) = FRAME_HEADER.unpack(await self._reader.readexactly(FRAME_HEADER.size))
                return await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise ChildDied(str(await self.died())) from None

    async def died(self) -> Exit:
        """Returns when the child has ended, however it ends."""
        code = await self._process.wait()
        return Exit(self.name, code, self._last_words())

    def _last_words(self) -> str:
        """The last line that this process wrote to its log; earlier lives wrote to the same file."""
        with self._log.open("rb") as file:
            file.seek(self._log_begins_at)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    async def end(self) -> None:
        """Ends the child: asks its process group to terminate, and kills it when it takes longer than the grace."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
                return


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """Sends one frame; the child's side."""
    connection.sendall(FRAME_HEADER.pack(len(frame)) + frame)


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next frame; None when the parent closed the socket. The child's side."""
    header = _receive_exactly(connection, FRAME_HEADER.size)
    if header is None:
        return None
    (size,) = FRAME_HEADER.unpack(header)
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    received = 0
    while received < size:
        count = connection.recv_into(view[received:])
        if count == 0:
            return None
        received += count
    return bytes(data)
