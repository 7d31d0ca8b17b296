"""Supervisor: runs one program in one backend, enforces its limits, and removes its processes and files."""

import contextlib
import fcntl
import marshal
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.errors import SandboxUnavailable
from shoal.sandbox.command import WORK_FOLDER, LaunchSpec, boxed, launch_spec
from shoal.sandbox.kernel import MOST_FILES, MOST_TREE_FILES, NONE, PARENT
from shoal.sandbox.program import Backend, Ended, Finished, Program, ProgramLimits, WorkTree
from shoal.sandbox.task_limit import is_exempt, task_group
from shoal.sandbox.usage import folder_holds_more, remove_tree, unshared_bytes, usage_of

START_TIMEOUT_S = 20.0
"""Seconds to set up the sandbox, on however busy a machine."""
END_TIMEOUT_S = 10.0
"""Seconds for the kernel to remove killed processes."""
WATCH_EVERY_S = 0.025
_CHUNK_BYTES = 1 << 16
_OWN_TASKS = 2
"""Processes of a sandbox that are not its program's: bubblewrap or the launcher, and the first process."""
_WALK_PAUSES = 20
_CHILD = re.compile(rb'"child-pid": (\d+)')
_ENDED = re.compile(rb"ended (\d+) ([\d.e-]+)\n")


def run_on(
    backend: Backend,
    program: Program,
    limits: ProgramLimits,
    stop: int | None = None,
    channel: socket.socket | None = None,
    pair: "list[Watch] | None" = None,
) -> Finished:
    """Runs a program to its end, or until the eventfd `stop` is written to.

    A `channel` becomes its standard input, and is closed here. Two programs that wait for each other share the list
    `pair`: only time in which neither runs nor could run is idle, and it counts for both. Raises `SandboxUnavailable`
    when the sandbox cannot be set up, `ValueError` for files beyond the limit.
    """
    size_bytes = sum(map(len, program.all_files.values()))
    if size_bytes > limits.file_bytes:
        raise ValueError(
            f"Program.files: expected at most {limits.file_bytes} bytes (Limits.file_bytes), got {size_bytes}"
        )
    try:
        with contextlib.ExitStack() as stack:
            folder = _folder(backend, program, stack)
            files_fd = stack.enter_context(_memory_file("files", marshal.dumps(dict(program.all_files))))
            stdin_fd = stack.enter_context(_memory_file("stdin", program.stdin))
            status_fd, their_status_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, status_fd)
            with contextlib.ExitStack() as theirs:
                theirs.callback(os.close, their_status_fd)
                if channel is not None:
                    theirs.enter_context(channel)
                info_fd = fcntl.fcntl(their_status_fd, fcntl.F_DUPFD_CLOEXEC, 0)
                theirs.callback(os.close, info_fd)
                spec = launch_spec(backend, program, limits, folder, their_status_fd, files_fd)
                limited = stack.enter_context(_limited(spec, limits.processes))
                process = subprocess.Popen(
                    [*limited, *boxed(spec, info_fd)],
                    stdin=stdin_fd if channel is None else channel.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={PARENT: str(os.getpid())},
                    pass_fds=(their_status_fd, info_fd, files_fd),
                    start_new_session=True,
                )
            with Watch(process, limits, backend, folder, status_fd, stop, program.tree, pair) as watch:
                return watch.run()
    except OSError as error:  # no process, no descriptor, no memory, no space
        raise SandboxUnavailable(f"the {backend.value} sandbox failed: {error}") from None


def _folder(backend: Backend, program: Program, stack: contextlib.ExitStack) -> str:
    """The program's current directory. Raises `SandboxUnavailable` for a work tree that the backend cannot show."""
    tree = program.tree
    if tree is None:
        return stack.enter_context(work_folder()) if backend is Backend.LANDLOCK else WORK_FOLDER
    if backend is Backend.LANDLOCK or (tree.layers and backend is not Backend.NAMESPACES):
        needed = Backend.NAMESPACES.value + ("" if tree.layers else f" or {Backend.BUBBLEWRAP.value}")
        raise SandboxUnavailable(f"a work tree needs the sandbox {needed}, got {backend.value}")
    return tree.current


@contextlib.contextmanager
def _limited(spec: LaunchSpec, processes: int) -> Iterator[list[str]]:
    """Command before a sandbox's own that limits its processes, if the program keeps root's user id.

    Raises `SandboxUnavailable` for a work tree of root's on a machine without this limit.
    """
    if spec.uid != NONE or spec.backend == Backend.LANDLOCK or not is_exempt(os.geteuid()):
        yield []
        return
    with task_group(processes + _OWN_TASKS) as joined:
        if joined is None and spec.tree:
            raise SandboxUnavailable(
                "a work tree of root's needs a control group for its limit of processes, and none can be made here; "
                "run Shoal as another user"
            )
        yield [] if joined is None else ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(joined)]


@contextlib.contextmanager
def work_folder() -> Iterator[str]:
    """An empty temporary folder for untrusted files, removed at the end at any depth."""
    outer = os.path.realpath(tempfile.mkdtemp(prefix="shoal-"))
    work = os.path.join(outer, "work")
    os.mkdir(work)
    try:
        yield work
    finally:
        remove_tree(work)
        os.rmdir(outer)


@contextlib.contextmanager
def _memory_file(name: str, content: bytes) -> Iterator[int]:
    """Sealed file in memory, at its start."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class Watch:
    """One running program, as a context manager; leaving it removes the program.

    Invariant: `ended` gives the reason for a kill, and is set before the kill.
    """

    process: subprocess.Popen[bytes]
    limits: ProgramLimits
    backend: Backend
    folder: str
    status_fd: int
    stop: int | None
    tree: WorkTree | None
    pair: "list[Watch] | None" = None
    reports: bytearray = field(default_factory=bytearray)
    """Reports of the launcher."""
    outputs: dict[int, bytearray] = field(default_factory=dict)
    """Output by file descriptor: standard output, then standard error."""
    launcher: int = NONE
    """Descriptor (pidfd) of the process started here."""
    first: int = NONE
    """Descriptor (pidfd) of the sandbox's first process; under Landlock, of the program."""
    first_pid: int = NONE
    started_s: float | None = None
    ended: Ended | None = None
    stopped: bool = False
    cpu_s: float = 0.0
    is_idle: bool = False
    idle_s: float = 0.0
    looked_s: float = 0.0
    """Time of the newest look at the program's usage."""
    next_walk_s: float = 0.0
    """Time of the next look at a work tree's files; walks take at most a twentieth of the time."""

    def __enter__(self) -> "Watch":
        try:
            self.launcher = os.pidfd_open(self.process.pid)
        except OSError:
            self.process.kill()
            self.process.communicate()
            raise
        if self.backend is Backend.LANDLOCK:
            self.first, self.first_pid = self.launcher, self.process.pid
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.outputs[stream.fileno()] = bytearray()
        if self.pair is not None:
            self.pair.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.is_idle = True
        if self.process.returncode is None:  # an internal error, or Ctrl-C
            self._kill(self.first)
            self._kill(self.launcher)
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        for descriptor in {self.launcher, self.first} - {NONE}:
            os.close(descriptor)

    def run(self) -> Finished:
        """Watches until the program ends, and returns its result."""
        began_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            stops = () if self.stop is None else (self.stop,)
            for descriptor in (*self.outputs, self.launcher, self.status_fd, *stops):
                selector.register(descriptor, selectors.EVENT_READ)
            self._watch(selector, began_s)
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)  # waited for here, to get its usage
        wall_s = time.monotonic() - (self.started_s or began_s)
        while self._read_reports():  # writers are gone: the pipes hold all that remains
            pass
        for descriptor in self.outputs:
            while self._read(descriptor):
                pass
        if self.backend is Backend.LANDLOCK:
            return self._finished(status, usage.ru_utime + usage.ru_stime, wall_s)
        report = _ENDED.search(self.reports)
        if report is None and self.started_s is not None and not (self.ended or self.stopped):
            raise SandboxUnavailable(f"the {self.backend.value} sandbox was ended from outside")
        status, cpu_s = (int(report[1]), float(report[2])) if report else (int(signal.SIGKILL), self.cpu_s)
        return self._finished(status, cpu_s, wall_s)

    def _watch(self, selector: selectors.BaseSelector, began_s: float) -> None:
        """Returns when the launcher has ended, and with it all processes that it started."""
        killed_s, next_s = None, began_s
        while True:
            ready = {key.fd for key, _ in selector.select(WATCH_EVERY_S)}
            if self.status_fd in ready and self._read_reports() == b"":
                selector.unregister(self.status_fd)
            for descriptor in ready & self.outputs.keys():
                if self._read(descriptor) == b"":
                    selector.unregister(descriptor)
            if self.launcher in ready:
                return
            if self.stop in ready:
                self.stopped = True
            now_s = time.monotonic()
            if killed_s is not None:
                if now_s > killed_s + END_TIMEOUT_S:
                    self._kill(self.launcher)
                continue
            if now_s >= next_s:
                next_s = now_s + WATCH_EVERY_S
                self.ended = self.ended or self._limit_broken(now_s, began_s)
            if self.ended or self.stopped:
                killed_s = now_s
                self._kill(self.first)

    def _read_reports(self) -> bytes | None:
        """Reads the launcher's reports; None when nothing has come yet, b"" at the end."""
        try:
            reports = os.read(self.status_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        self.reports += reports
        child = _CHILD.search(self.reports)
        if self.first == NONE and child is not None:
            self.first_pid = int(child[1])
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self.first = os.pidfd_open(self.first_pid)
        if self.started_s is None and b"started\n" in self.reports:
            self.started_s = time.monotonic()
        return reports

    def _read(self, descriptor: int) -> bytes | None:
        """Reads the program's output within its limit; None when nothing has come yet, b"" at the end."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        room = self.limits.output_bytes - sum(map(len, self.outputs.values()))
        self.outputs[descriptor] += chunk[:room]
        if len(chunk) > room:
            self.ended = self.ended or Ended.KILLED_OUTPUT
        return chunk

    def _limit_broken(self, now_s: float, began_s: float) -> Ended | None:
        if self.started_s is None:
            return Ended.KILLED_WALL if now_s > began_s + START_TIMEOUT_S else None
        if now_s > self.started_s + self.limits.wall_s:
            return Ended.KILLED_WALL
        usage = usage_of(self.first_pid)
        self.is_idle = not usage.is_ready and usage.cpu_s <= self.cpu_s
        is_whole = self.pair is None or len(self.pair) == 2
        if self.looked_s and is_whole and all(one.is_idle for one in self.pair or (self,)):
            self.idle_s += now_s - self.looked_s
        self.looked_s = now_s
        self.cpu_s = max(self.cpu_s, usage.cpu_s)
        if self.idle_s > self.limits.idle_s:
            return Ended.KILLED_IDLE
        if usage.cpu_s > self.limits.cpu_s:
            return Ended.KILLED_CPU
        if usage.memory_bytes > self.limits.memory_bytes and unshared_bytes(usage.pids) > self.limits.memory_bytes:
            return Ended.KILLED_MEMORY
        own = self.backend is not Backend.LANDLOCK  # the first process is not the program's
        if usage.tasks - own > self.limits.processes:
            return Ended.KILLED_PROCESSES
        return Ended.KILLED_FILES if self._files_broken() else None

    def _files_broken(self) -> bool:
        if self.tree is not None:
            if (now_s := time.monotonic()) < self.next_walk_s:
                return False
            most = (self.tree.held_bytes + self.limits.file_bytes, self.tree.held_files + MOST_TREE_FILES)
            broken = folder_holds_more(str(self.tree.changed), *most)
            self.next_walk_s = time.monotonic() + _WALK_PAUSES * (time.monotonic() - now_s)
            return broken
        if self.backend is Backend.LANDLOCK:
            return folder_holds_more(self.folder, self.limits.file_bytes, MOST_FILES)
        if self.backend is Backend.BUBBLEWRAP:  # bubblewrap has no option for the number of files
            with contextlib.suppress(OSError):
                mount = os.statvfs(f"/proc/{self.first_pid}/root{self.folder}")
                return mount.f_files - mount.f_ffree > MOST_FILES
        return False

    def _kill(self, descriptor: int) -> None:
        """Kills the sandbox's first process, and thereby everything in it, or else the launcher."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.launcher if descriptor == NONE else descriptor, signal.SIGKILL)

    def _finished(self, status: int, cpu_s: float, wall_s: float) -> Finished:
        if self.started_s is None and not self.stopped:
            raise SandboxUnavailable(self._why_not_started())
        code = os.waitstatus_to_exitcode(status)
        ended = self.ended or (Ended.EXITED if code >= 0 else Ended.SIGNALLED)
        late = -code == signal.SIGKILL and cpu_s >= math.ceil(self.limits.cpu_s)  # the kernel's hard limit
        if ended is Ended.SIGNALLED and (late or -code == signal.SIGXCPU):
            ended = Ended.KILLED_CPU
        stdout, stderr = map(bytes, self.outputs.values())
        exit_code = code if ended is Ended.EXITED else None
        number = -code if ended is Ended.SIGNALLED else None
        return Finished(ended, exit_code, number, stdout, stderr, wall_s, cpu_s, self.backend)

    def _why_not_started(self) -> str:
        reports = self.reports.decode(errors="replace").partition("failed ")[2].strip()
        words = [bytes(output).decode(errors="replace").strip() for output in self.outputs.values()]
        why = reports or " ".join(filter(None, words))[-500:] or f"no report came in {START_TIMEOUT_S:g} s"
        return f"the {self.backend.value} sandbox could not be set up: {why}"
