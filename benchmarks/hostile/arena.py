"""The arena gives hostile programs targets, and checks whether they reached any."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hostile.corpus import Case, Verdict
from benchmarks.hostile.judged import HONEST as HONEST_WITH_TESTS
from benchmarks.hostile.judged import JUDGED, TESTS
from shoal.checker import Code
from shoal.reward.code_runner import CodeScorer
from shoal.sandbox.program import Backend, Ended, Finished, Program, ProgramLimits
from shoal.types import RewardStatus, Task

AT_ONCE = 4
HONEST_EVERY = 6
"""Wrong programs between two right programs."""
SECRET = "the secret of the run"
EXPECTED = b"42\n"
"""Output of a right answer to the task, which doubles the number read."""
HONEST = Program("print(2 * int(input()))", stdin=b"21\n")
QUICK = ProgramLimits(
    wall_s=0.5, cpu_s=1.0, memory_bytes=128 << 20, processes=16, output_bytes=1 << 20, file_bytes=8 << 20
)
"""Limits for programs that would use all the time they get."""
PATIENT = ProgramLimits(wall_s=20.0, cpu_s=5.0, memory_bytes=128 << 20, file_bytes=8 << 20)


@dataclass(frozen=True, slots=True)
class Outside:
    """Files, sockets and a process that no program may touch."""

    folder: Path
    stream: socket.socket
    datagrams: socket.socket
    abstract: socket.socket
    unix: socket.socket
    unix_datagrams: socket.socket
    decoy: subprocess.Popen[bytes]

    def source(self, case: Case) -> str:
        """Fills a case's program with the names of targets outside."""
        names = {
            "SECRET": self.folder / "secret",
            "VICTIM": self.folder / "victim",
            "TARGET": self.folder / "target",
            "FOLDER": self.folder,
            "PORT": self.stream.getsockname()[1],
            "UDP": self.datagrams.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname()[1:].decode(),
            "UNIX": self.folder / "socket",
            "DATAGRAMS": self.folder / "datagrams",
            "PARENT": os.getpid(),
            "DECOY": self.decoy.pid,
        }
        source = case.source
        for name, value in names.items():
            source = source.replace(f"@{name}@", str(value))
        return source

    def harm(self) -> list[str]:
        """Harm done to the targets, one sentence each."""
        found = []
        victim = self.folder / "victim"
        if {path.name for path in self.folder.iterdir()} != {"secret", "victim", "socket", "datagrams"}:
            found.append(f"files came or went: {sorted(path.name for path in self.folder.iterdir())}")
        elif victim.read_text() != "whole" or victim.stat().st_mode & 0o777 != 0o600 or victim.stat().st_mtime < 2:
            found.append("the victim is not what it was")
        if (self.folder / "secret").read_text() != SECRET:
            found.append("the secret was changed")
        for name in ("stream", "datagrams", "abstract", "unix", "unix_datagrams"):
            listener: socket.socket = getattr(self, name)
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(1)
                else:
                    listener.accept()[0].close()
                found.append(f"something came in by {name}")
        if self.decoy.poll() is not None:
            found.append("the decoy was killed")
        return found


@contextlib.contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    """Opens all targets for attack; SIGUSR1 to this process would end it."""
    for name, text in (("secret", SECRET), ("victim", "whole")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    with contextlib.ExitStack() as stack:
        listening = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0shoal-hostile-{os.getpid()}-{folder.name}"),
            (socket.AF_UNIX, socket.SOCK_STREAM, os.path.relpath(folder / "socket")),
            (socket.AF_UNIX, socket.SOCK_DGRAM, os.path.relpath(folder / "datagrams")),
        ):
            listener = stack.enter_context(socket.socket(family, kind))
            listener.bind(address)
            listener.setblocking(False)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listening.append(listener)
        decoy = stack.enter_context(
            subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        )
        stack.callback(decoy.kill)
        stream, datagrams, abstract, unix, unix_datagrams = listening
        yield Outside(folder, stream, datagrams, abstract, unix, unix_datagrams, decoy)


def limits_of(case: Case) -> ProgramLimits:
    """Limits of a case: short for programs that would use all they get."""
    hog = case.verdict is Verdict.KILLED or "sleep(3600)" in case.source
    slow = case.ends and Ended.EXITED in case.ends and not case.ends & {Ended.KILLED_WALL}
    return QUICK if hog and not slow else PATIENT


def faults(case: Case, finished: Finished) -> list[str]:
    """Faults in how a case ended, one sentence each; none when it was contained and judged rightly."""
    found = []
    if b"BREACH" in finished.stdout:
        found.append(f"it got what it wanted: {finished.stdout[:200]!r}")
    if SECRET.encode() in finished.stdout + finished.stderr:
        found.append("it read the secret")
    if finished.ended not in case.ends:
        found.append(f"ended {finished.ended.value}, expected one of {sorted(case.ends)}: {finished.stderr[-300:]!r}")
    if case.verdict is Verdict.REFUSED and finished.exit_code == 0:
        found.append("it was not refused")
    if finished.ok and finished.stdout == EXPECTED:
        found.append("it passed for a right answer")
    return found


async def unjust(kind: str, backend: Backend | None = None) -> list[str]:
    """Faults in the scores of wrong programs and of the right ones among them, one sentence each."""
    cases = [(case.name, case.source, 0.0) for case in JUDGED if case.kind == kind]
    for place in reversed(range(0, len(cases) + 1, HONEST_EVERY)):
        cases.insert(place, (f"a right program at {place}", HONEST_WITH_TESTS[kind], 1.0))
    task = Task("hostile", "hostile", (), None, json.dumps({"tests": TESTS[kind]}))
    async with contextlib.aclosing(CodeScorer(AT_ONCE, backend)) as scorer:
        spec = Code(timeout_s=0.25, memory_mb=128)
        rewards = await scorer.score_by(spec, task, [source for _, source, _ in cases])
    return [
        f"{name}: {reward}"
        for (name, _, value), reward in zip(cases, rewards, strict=True)
        if reward.status is not RewardStatus.SCORED or reward.value != value
    ]


def run_bare(source: str, folder: Path) -> str:
    """Runs a program without a sandbox; returns its output."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
        env={"HOME": "/"},
        check=False,
        start_new_session=True,
    )
    return done.stdout


def ignoring_usr1() -> contextlib.AbstractContextManager[list[int]]:
    """Counts SIGUSR1 instead of dying of it."""
    return _Counting()


class _Counting(contextlib.AbstractContextManager[list[int]]):
    def __enter__(self) -> list[int]:
        self._got: list[int] = []
        self._before = signal.signal(signal.SIGUSR1, lambda number, _: self._got.append(number))
        return self._got

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)
