"""What is done to a run: each kind of fault, for real."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import nats
import psutil

from benchmarks.chaos.schedule import Fault, Kind, Role
from benchmarks.chaos.victim import Victim

SEARCH_S = 3.0
"""How long a process of a role is looked for."""
TICK_S = 0.01
LOOK_S = 0.03
"""Between two looks for a process, each of which reads of all processes of the machine."""
STOPPED_S, RUNNING_S = 0.2, 0.02
"""Of a slow engine, in turn."""
CLIENTS = 8
FRAMES = 400
"""Of a lying peer, each time."""
PLACE, DISK = "shoal-chaos-", "disk"
DISK_BYTES = 256 << 20
CLOCK_SOURCE = Path(__file__).with_name("clock.c")
SHIFT = struct.Struct("=q")
"""Of the clock, in seconds."""
HALVES = (
    b"\x16\x03\x01\x02\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b'content-length: 99999\r\n\r\n{"token_ids": [1',
    b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /pause HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n",
)
RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing sends RST."""


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder for one campaign. Those of campaigns that were killed are removed first, with what is mounted there."""
    for left in Path(tempfile.gettempdir()).glob(f"{PLACE}*"):
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            _unmount(left / DISK)
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PLACE}{os.getpid()}-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Puts a small file system into a campaign's folder while it is open; whether that could be done (takes root)."""
    folder = place / DISK
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            _unmount(folder)


def _unmount(folder: Path) -> None:
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


def false_clock(folder: Path) -> dict[str, str]:
    """The variables under which a process takes its wall clock from a file; none without a C compiler."""
    library, compiler = folder / "clock.so", shutil.which("cc")
    if compiler is None:
        return {}
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, CLOCK_SOURCE, "-ldl"], check=True)
    (folder / "clock").write_bytes(SHIFT.pack(0))
    return {"LD_PRELOAD": str(library), "SHOAL_CLOCK": str(folder / "clock")}


@dataclass(slots=True)
class Faults:
    """Does faults to one victim, several at once; those of one process take turns."""

    victim: Victim
    folder: Path
    """Of the clock."""
    disk: bool
    """Whether the run has a small file system of its own."""
    clock: bool
    swarm_url: str
    lies: Sequence[tuple[str, bytes]]
    """Subjects and frames."""
    full: bool = False
    """Whether the disk is full now."""
    _turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def left_out(self) -> Mapping[str, str]:
        """Kinds that this machine does not allow, and why."""
        return {
            **({} if self.disk else {Kind.FULL_DISK: "a small file system takes root"}),
            **({} if self.clock else {Kind.CLOCK: "no C compiler is installed"}),
            **({} if self.lies else {Kind.LYING_PEER: "this seed's run is in no swarm"}),
        }

    async def done(self, fault: Fault) -> bool:
        """Does one and takes it back, when it is one that ends; whether it found what it is done to."""
        if fault.kind in self.left_out():
            return False
        does: dict[Kind, Callable[[Fault], Awaitable[bool]]] = {
            Kind.STOP: self._stop,
            Kind.FULL_DISK: self._fill,
            Kind.LOCKED_LOG: self._lock,
            Kind.CUT_FRAME: self._cut,
            Kind.SLOW_ENGINE: self._slow,
            Kind.LYING_PEER: self._lie,
            Kind.CLOCK: self._jump,
        }
        if fault.kind is Kind.KILL:  # what is stopped just now may be killed
            return await self._kill(fault)
        async with self._turns[Role.ENGINE if fault.kind is Kind.SLOW_ENGINE else fault.role or fault.kind]:
            return await does[fault.kind](fault)

    async def _found(self, role: Role | None, seed: int) -> psutil.Process | None:
        """One process of a role; sandboxes live for a moment only."""
        deadline_s = time.monotonic() + SEARCH_S
        while time.monotonic() < deadline_s:
            if found := self.victim.processes(role):
                return random.Random(seed).choice(found)
            await asyncio.sleep(LOOK_S)
        return None

    async def _kill(self, fault: Fault) -> bool:
        process = await self._found(fault.role, fault.seed)
        if process is None:
            return False
        if fault.role is Role.MAIN:
            self.victim.killed = True
        return _signalled(process, signal.SIGKILL)

    async def _stop(self, fault: Fault) -> bool:
        process = await self._found(fault.role, fault.seed)
        if process is None or not _signalled(process, signal.SIGSTOP):
            return False
        try:
            await asyncio.sleep(fault.hold_s)
        finally:
            _signalled(process, signal.SIGCONT)
        return True

    async def _slow(self, fault: Fault) -> bool:
        process = await self._found(Role.ENGINE, fault.seed)
        deadline_s = time.monotonic() + fault.hold_s
        while process is not None and time.monotonic() < deadline_s:
            try:
                if not _signalled(process, signal.SIGSTOP):
                    break
                await asyncio.sleep(STOPPED_S)
            finally:
                _signalled(process, signal.SIGCONT)
            await asyncio.sleep(RUNNING_S)
        return process is not None

    async def _fill(self, fault: Fault) -> bool:
        ballast = self.victim.run_dir.parent / "ballast"
        deadline_s, self.full = time.monotonic() + fault.hold_s, True
        try:
            with ballast.open("wb") as file:
                while time.monotonic() < deadline_s:  # what the run removes meanwhile is taken as well
                    free = os.statvfs(ballast)
                    if free.f_bavail:
                        with contextlib.suppress(OSError):
                            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free.f_bavail << 12)
                    await asyncio.sleep(TICK_S)
        finally:
            ballast.unlink()
            self.full = False
        return True

    async def _lock(self, fault: Fault) -> bool:
        path, deadline_s = self.victim.run_dir / "log.sqlite", time.monotonic() + SEARCH_S
        if not path.exists():
            return False
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
            while time.monotonic() < deadline_s:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    await asyncio.sleep(fault.hold_s)
                    connection.execute("ROLLBACK")
                    return True
                except sqlite3.OperationalError:  # the run writes just now
                    await asyncio.sleep(TICK_S)
        return False

    async def _cut(self, fault: Fault) -> bool:
        dice = random.Random(fault.seed)
        process = await self._found(Role.ENGINE, fault.seed)
        if process is None:
            return False
        with contextlib.suppress(psutil.Error):
            ports = [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for _ in range(CLIENTS if ports else 0):
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", dice.choice(ports)), 1.0))
                    half = dice.choice(HALVES)
                    client.sendall(half[: dice.randrange(1, len(half) + 1)] + dice.randbytes(dice.randrange(20)))
                    if dice.random() < 0.5:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                await asyncio.sleep(fault.hold_s)
            return bool(ports)
        return False

    async def _lie(self, fault: Fault) -> bool:
        dice = random.Random(fault.seed)
        client = await nats.connect(self.swarm_url)
        try:
            for subject, frame in dice.choices(self.lies, k=FRAMES):
                await client.publish(subject, frame)
            await client.flush()
        finally:
            await client.close()
        return True

    async def _jump(self, fault: Fault) -> bool:
        with (self.folder / "clock").open("r+b") as file:  # in its place: processes have it in their memory
            file.write(SHIFT.pack(round(fault.jump_s)))
        await asyncio.sleep(fault.hold_s)
        return self.victim.pid is not None


def _signalled(process: psutil.Process, number: signal.Signals) -> bool:
    """Sends a signal to this very process, unless it is gone."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False
