"""A real run that is kept going: `shoal train`, started again with `--resume` whenever it ended."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import on_path
from benchmarks.chaos.schedule import Role
from shoal.config import Config, to_toml
from shoal.net.process import PARENT

STANDSTILL_S = 60.0
"""Without a change of the log or of metrics.jsonl, and without an end, less the time in which a thread of the run waits
for a processor: a machine that is busy with others starts a run slowly."""
LONGEST_S = 300.0
"""Of a standstill that nothing excuses."""
POLL_S = 0.1
DELAY_POLL_S = 1.0
MAIN = """
import signal
from shoal.net.process import die_with_parent
die_with_parent()
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background ignore
from shoal.cli import main
main()
"""
MODULES = {
    Role.ENGINE: "shoal.engine.server.http_server",
    Role.TRAINER: "shoal.trainer.worker",
    Role.REWARDS: "shoal.reward.worker",
    Role.DRAWER: "shoal.tasks.procedural_worker",
    Role.SANDBOX: "shoal.sandbox.launcher",
}
"""Part of the command line of each process but the main one."""
BOXED_WORKER = MODULES[Role.REWARDS].encode().hex()
"""In the command line of a box, when it is no program's, but a reward worker's."""
WATCHED = ("metrics.jsonl", "log.sqlite", "log.sqlite-wal")
MOST_BARREN = 10
"""Starts in a row that make no step, and are not killed on purpose."""
MOST_WORDS = 3000
"""Kept of what an unnamed end said."""


@dataclass(slots=True)
class Delays:
    """How long threads were ready to run, but had no processor: the kernel counts it."""

    waited_s: float = 0.0
    """Since it was set to 0: of each second, that of the thread that waited for the longest."""
    _looked_s: float = field(default_factory=time.monotonic)
    _before: dict[Path, int] = field(default_factory=dict)  # nanoseconds

    def look(self, processes: Callable[[], list[psutil.Process]]) -> None:
        """Adds what came since the last look, at most once a second."""
        passed_s = time.monotonic() - self._looked_s
        if passed_s < DELAY_POLL_S:
            return
        now: dict[Path, int] = {}
        for process in processes():
            with contextlib.suppress(OSError):  # it ended just now
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    with contextlib.suppress(OSError):
                        now[thread] = int((thread / "schedstat").read_text().split()[1])
        longest_ns = max((waited - self._before.get(thread, 0) for thread, waited in now.items()), default=0)
        self.waited_s += min(passed_s, longest_ns / 1e9)
        self._before, self._looked_s = now, time.monotonic()


@dataclass(slots=True)
class Victim:
    """The run, its present process, and how the earlier ones ended."""

    config: Config
    folder: Path
    """For what is not the run's: its terminal."""
    extra: Mapping[str, str]
    """Environment variables."""
    on_end: Callable[[], None]
    """Is called between two processes."""
    resumed: int = 0
    standstills: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    """Ends without a sentence, with the last words."""
    sentences: list[str] = field(default_factory=list)
    killed: bool = False
    """Whether the main process was killed on purpose."""
    ending: bool = False
    most_barren: int = MOST_BARREN
    _process: subprocess.Popen[bytes] | None = None
    _began_s: float = 0.0
    _steps_before: int = 0
    _told: int = 0
    """Bytes of metrics.jsonl whose steps are counted."""
    _steps: int = 0

    @property
    def run_dir(self) -> Path:
        """Of the run."""
        return Path(self.config.run_dir)

    @property
    def steps(self) -> int:
        """Recorded in metrics.jsonl so far."""
        with contextlib.suppress(FileNotFoundError), (self.run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(self._told)
            new, whole, _ = file.read().rpartition(b"\n")
            self._told += len(new + whole)
            self._steps += new.count(b'"kind":"step"')
        return self._steps

    @property
    def age_s(self) -> float:
        """Of the present process; less than 0 when there is none."""
        return time.monotonic() - self._began_s if self.pid else -1.0

    @property
    def has_stepped(self) -> bool:
        """Whether the present process made a step."""
        return self.pid is not None and self.steps > self._steps_before

    @property
    def pid(self) -> int | None:
        """Of the main process, while it lives."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def processes(self, role: Role | None = None) -> list[psutil.Process]:
        """Those of a role that live now; all when none is named."""
        if (pid := self.pid) is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(pid)
            if role is Role.MAIN:
                return [main]
            below = main.children(recursive=True)
            return [one for one in below if _is(one, role)] if role else [main, *below]
        return []

    async def live(self) -> None:
        """Starts the run and starts it again, until `ending`; then interrupts it."""
        (self.folder / "config.toml").write_text(to_toml(self.config))
        first, barren = True, 0
        while not self.ending:
            terminal = self.folder / "terminal"
            self.killed, self._steps_before = False, self.steps
            begun = (self.run_dir / "log.sqlite").exists()
            with terminal.open("wb") as output:
                self._process, self._began_s = self._started(output.fileno(), resume=begun), time.monotonic()
            try:
                await self._watch(self._process, terminal)
            finally:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
            self._judge(self._process.returncode, self._said(terminal))
            self.resumed += not first
            first = False
            await asyncio.to_thread(self.on_end)
            barren = 0 if self.steps > self._steps_before or self.killed else barren + 1
            if barren == self.most_barren:
                self.standstills.append(f"no step in {barren} starts; {self.sentences[-1:]} {self.unnamed[-1:]}")
                return

    def _started(self, output: int, *, resume: bool) -> subprocess.Popen[bytes]:
        arguments = ["train", str(self.folder / "config.toml"), *(["--resume"] if resume else [])]
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=self.folder,
            env={**on_path(os.environ), **self.extra, PARENT: str(os.getpid())},
            start_new_session=True,
        )

    async def _watch(self, process: subprocess.Popen[bytes], terminal: Path) -> None:
        """Returns when the run has ended, or has stood still for too long."""
        seen, since_s, interrupted, delays = list(self._marks()), time.monotonic(), False, Delays()
        while process.poll() is None:
            await asyncio.sleep(POLL_S)
            delays.look(self.processes)
            if self.ending and not interrupted:
                process.send_signal(signal.SIGINT)
                since_s, interrupted = time.monotonic(), True
                delays.waited_s = 0.0
            if not interrupted and (now := list(self._marks())) != seen:
                seen, since_s, delays.waited_s = now, time.monotonic(), 0.0
            elif time.monotonic() - since_s > min(STANDSTILL_S + delays.waited_s, LONGEST_S):
                still_s = time.monotonic() - since_s
                used = f"{still_s:.0f} s, {delays.waited_s:.0f} s of them for a processor; {self._used()}"
                process.send_signal(signal.SIGUSR1)  # has it say who waits for whom
                await asyncio.sleep(1.0)
                said = await asyncio.to_thread(self._said, terminal)
                self.standstills.append(f"{used}; {said[-MOST_WORDS:]}")
                self.killed = True
                return

    def _used(self) -> str:
        """What the machine had to do, and what of it was the run's: one that waits for a processor does not hang."""
        words = [f"{os.getloadavg()[0]:.1f} processes wanted {os.cpu_count()} cores"]
        for one in self.processes():
            with contextlib.suppress(psutil.Error):
                taken, age_s = one.cpu_times(), time.time() - one.create_time()
                words.append(f"{one.pid} {one.status()}: {taken.user + taken.system:.1f} s of {age_s:.0f}")
        return ", ".join(words)

    def _marks(self) -> Iterator[tuple[int, int]]:
        for name in WATCHED:
            with contextlib.suppress(FileNotFoundError):
                status = (self.run_dir / name).stat()
                yield status.st_size, status.st_mtime_ns

    def _said(self, terminal: Path) -> str:
        return terminal.read_text(errors="replace").replace(str(self.folder), "RUN")

    def _judge(self, code: int, said: str) -> None:
        """Notes how a process ended: it was killed, or it says why in a sentence."""
        lines = [line for line in said.splitlines() if line.startswith("shoal: ")]
        if self.killed and code in (-signal.SIGKILL, -signal.SIGUSR1):
            return
        if lines and code in (2, 130) and "Traceback" not in said:
            self.sentences.append(lines[-1])
            return
        self.unnamed.append(f"code {code}: {said[-MOST_WORDS:]}")

    def events(self) -> list[str]:
        """The names of all events of the run."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["name"] for line in lines if '"kind":"event"' in line and line.endswith("}")]


def _is(process: psutil.Process, role: Role) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline())
        return MODULES[role] in words and not (role is Role.SANDBOX and BOXED_WORKER in words)
    return False
