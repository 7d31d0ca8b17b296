"""Child processes: spawned in separate process groups, and killed with their parent.

A child is `python -m module ...`. It never shares memory that torch touched, and one socket connects it to its parent.
The socket carries frames with a size and a request number. Callers without an event loop use `Child` through anyio's
portal, which runs a loop in a thread.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from shoal.errors import ChildDied
from shoal.net.ending import ended, settled

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
PARENT = "SHOAL_PARENT_PID"
FRAME_HEADER = struct.Struct(">IQ")
"""Size of the frame, and the number of the request that it asks or answers; 0 before the first request."""
MAX_FRAME_BYTES = 1 << 30
GRACE_S = 5.0
BUFFERED_GRACE_S = 0.2
"""Seconds after a deadline in which buffered bytes are still read: an answer that arrived while the event loop was
busy is not late."""


def cores() -> int:
    """Number of cores that this process may use, or of all cores where the system does not say."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends; children call it first (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = int(os.environ.pop(PARENT, os.getppid()))  # removed, so that this process's own children do not read it
    if os.getppid() != parent:  # the parent ended before the request reached the kernel
        os._exit(1)


def from_parent() -> tuple[socket.socket, list[str]]:
    """In a child: the socket to its parent, and the arguments before it. The child will end with its parent."""
    die_with_parent()
    *arguments, _, fd = sys.argv[1:]
    return socket.socket(fileno=int(fd)), arguments


def torch_environment(threads: int, gpus: Sequence[str] = (), *, gathers: bool = False) -> dict[str, str]:
    """Environment of a process that computes with torch on `threads` cores, and on `gpus` if given.

    Idle OpenMP threads sleep instead of spinning, because spinning collapses when processes share cores. glibc keeps
    freed memory for the next tensor; otherwise the kernel would clear it. Blocks as large as a chunk of logits are
    returned, because small tensors would fragment them. A rank that `gathers` layers returns every layer: glibc cannot
    reuse a kept block for an aligned one of the same size, and 16 layers of 36 MB took 60 MB more each. oneDNN keeps
    128 compiled products instead of 1,024, a third of a megabyte each. Huge pages save 8 % of the
    time of a decoding step's matrix products. torch numbers the GPUs that a process sees, so LOCAL_RANK follows them.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 22 if gathers else 1 << 26),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_ARENA_MAX": "2",
        "GLIBC_TUNABLES": ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"))),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",  # transformers' reader of GGUF files has no other switch
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus), "LOCAL_RANK": "0"} if gpus else {}),
    }


@dataclass(frozen=True, slots=True)
class Exit:
    """End of a child."""

    name: str
    returncode: int
    last_words: str

    def __str__(self) -> str:
        how = f"signal {-self.returncode}" if self.returncode < 0 else f"code {self.returncode}"
        said = f": {self.last_words}" if self.last_words else ""
        return f"the {self.name} process ended with {how}{said}"


class Child:
    """One running child and the socket to it, as an async context manager; leaving it ends the child.

    Invariant: each caller gets the answer to its own request, never a late answer to a cancelled `call`.
    """

    most_frame_bytes = MAX_FRAME_BYTES
    """Bytes of a frame that the child may send; a child that sends more is treated as dead."""
    grace_s = GRACE_S
    """Seconds that the child has to end by itself before it is killed."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path | None,
        env: Mapping[str, str],
        *,
        own_group: bool = True,
    ) -> None:
        """Entering starts `python -m module arguments... --fd N`, where N is the child's end of the socket.

        Without a `log` the child writes to this process's output. Without `own_group` it gets the signals of this
        process's group.
        """
        self.name = name
        self._module = module
        self._arguments = tuple(arguments)
        self._log = log
        self._env = dict(env)
        self._own_group = own_group
        self._turn = asyncio.Lock()
        self._asked = 0
        self._waiting: set[int] = set()  # numbers of requests whose answers callers wait for
        self._came: dict[int, bytes] = {}  # answers by the number of their request
        self._reading: asyncio.Task[None] | None = None

    def command(self, fd: int) -> list[str]:
        """Command of the child; descriptor `fd` is its end of the socket."""
        return [sys.executable, "-m", self._module, *self._arguments, "--fd", str(fd)]

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(self._start())
        try:
            await settled(starting)
        except asyncio.CancelledError:
            if not starting.cancelled():
                self.kill()
                await self.end()
            raise
        return self

    async def _start(self) -> None:
        """Starts the process and connects the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack, contextlib.ExitStack() as failing:
            failing.callback(ours.close)
            output = None
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(self._log.open("ab"))
                self._log_begins_at = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._env, PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=self._own_group,
            )
            failing.pop_all()
        ours.setblocking(False)
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_FRAME_BYTES)
        except BaseException:  # such as a cancellation at the end of the event loop
            self.kill()
            await ended(self._process, self.kill, self.grace_s)
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def closed(self) -> bool:
        """Whether the child has closed its end of the socket, and all its bytes were read."""
        return self._reader.at_eof()

    async def ready(self, timeout_s: float) -> bytes:
        """First frame of the child. Raises `ChildDied` when the child ends or stays silent for `timeout_s`."""
        try:
            return await self.receive(timeout_s)
        except TimeoutError:
            log = self._last_words() or "nothing"
            raise ChildDied(f"the {self.name} process was not ready in {timeout_s:g} s; its log ends: {log}") from None

    @property
    def ticks(self) -> int:
        """Processor time of the child, in ticks; 0 where the system does not say."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        return 0

    def place(self, folder: Path) -> str:
        """Implements `Worker`: a child has the disk of this process."""
        return str(folder)

    async def call(self, frame: bytes, timeout_s: float, *, concurrent: bool = False, **_: Path | None) -> bytes:
        """Sends one frame and returns the answer; callers take turns, and the deadline begins with the turn.

        A `concurrent` call takes no turn: the child answers it while it serves others. Raises `ChildDied`. After
        the deadline it kills the child and raises `TimeoutError`.
        """
        async with contextlib.nullcontext() if concurrent else self._turn:
            number = self.send(frame)
            try:
                return await self._received(number, timeout_s)
            except TimeoutError:
                self.kill()
                raise

    def send(self, frame: bytes) -> int:
        """Sends one request and returns its number; answers without a caller are skipped."""
        self._asked += 1
        self._came = {number: answer for number, answer in self._came.items() if number in self._waiting}
        self._writer.write(FRAME_HEADER.pack(len(frame), self._asked) + frame)
        return self._asked

    async def receive(self, timeout_s: float) -> bytes:
        """Next frame that answers the newest request. Raises `TimeoutError` at the deadline, `ChildDied`."""
        return await self._received(self._asked, timeout_s)

    async def _received(self, number: int, timeout_s: float) -> bytes:
        self._waiting.add(number)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await self._answer(number)
            async with asyncio.timeout(BUFFERED_GRACE_S):
                return await self._answer(number)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._death() from None
        finally:
            self._waiting.discard(number)

    async def _answer(self, number: int) -> bytes:
        """Next answer to a request; one caller reads for all. A cancellation loses no byte: the reading goes on."""
        while number not in self._came:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(), name=f"answer of {self.name}")
                self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.wait([reading := self._reading])
            reading.result()
        return self._came.pop(number)

    async def _read(self) -> None:
        """Keeps the next frame, if it is wanted."""
        size, number = FRAME_HEADER.unpack(await self._reader.readexactly(FRAME_HEADER.size))
        if size > self.most_frame_bytes:
            raise ConnectionError(f"a frame of {size} bytes")
        frame = await self._reader.readexactly(size)
        if number in self._waiting or number == self._asked:
            self._came[number] = frame

    async def died(self) -> Exit:
        """Waits until the child has ended; returns how."""
        return Exit(self.name, await self._process.wait(), self._last_words())

    async def _death(self) -> ChildDied:
        """Error for a child that closed its socket; a child that still runs is killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                return ChildDied(str(await self.died()))
        self.kill()
        return ChildDied(f"the {self.name} process closed its connection without ending, and was killed")

    def _last_words(self) -> str:
        """Last line of this process in its log; earlier processes wrote to the same file."""
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_begins_at)
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError as error:  # such as too many open files: the end of the child is the news
            return f"its log cannot be read ({error.strerror})"
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """Kills the process group at once; `end` waits for it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if self._own_group else os.kill)(self._process.pid, number)

    async def end(self) -> None:
        """Ends the child: terminates its process group, and kills it after the grace, or at once when cancelled."""
        self._writer.transport.abort()  # a child that hangs would never read unsent bytes
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process handles SIGTERM only then
        await ended(self._process, self.kill, self.grace_s, hurry=self.kill)


def serve(connection: socket.socket, answers: Callable[[bytes], Iterable["bytes | Future[bytes]"]]) -> None:
    """Sends the answers to each request, until the parent closes the socket; the child's side.

    An answer that is a future is sent once it has come, between those to later requests.
    """
    sending = threading.Lock()

    def send(number: int, answer: bytes) -> None:
        with sending:
            send_frame(connection, answer, number)

    def send_later(number: int, come: "Future[bytes]") -> None:
        with contextlib.suppress(OSError):  # the parent has closed the socket
            send(number, come.result())

    while (received := receive_frame(connection)) is not None:
        number, frame = received
        for answer in answers(frame):
            if isinstance(answer, bytes):
                send(number, answer)
            else:
                answer.add_done_callback(partial(send_later, number))


def send_frame(connection: socket.socket, frame: bytes, number: int = 0) -> None:
    """Sends one frame for the request `number`; number 0, the first, reports that a child is ready."""
    connection.sendall(FRAME_HEADER.pack(len(frame), number) + frame)


def receive_frame(connection: socket.socket) -> tuple[int, bytes] | None:
    """Next frame and the number of its request; None when the other side closed the socket."""
    header = _receive_exactly(connection, FRAME_HEADER.size)
    if header is None:
        return None
    size, number = FRAME_HEADER.unpack(header)
    frame = _receive_exactly(connection, size)
    return None if frame is None else (number, frame)


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
