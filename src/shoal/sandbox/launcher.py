"""Launcher: a fresh process that confines itself and becomes the program.

The launcher starts at the place `outside`. Under Landlock it confines itself and becomes the program. With namespaces
it makes them, and its child is their first process. Under bubblewrap, which makes the namespaces, the launcher starts
at the place `inside`. The first process starts the program and reports how the program ended. Its own end kills every
process that the program left running.

The launcher reports through a pipe. `{"child-pid": N}` names the first process, in bubblewrap's words. `started` and
`ended STATUS CPU_S` (in wait(2)'s terms) report the program, and `failed WHY` a sandbox that could not be set up.
"""

import _signal  # type: ignore[import-not-found]  # as signal, without the milliseconds
import marshal
import os
import resource
import select
import sys

from shoal.sandbox import files, kernel, seccomp
from shoal.sandbox.kernel import LANDLOCK, NONE, PARENT

TYPE_CHECKING = False
if TYPE_CHECKING:  # which take milliseconds
    from shoal.sandbox.command import LaunchSpec

NOT_FOUND = 127
_NOBODY = 65534
_SIGKILL = 9
_MOST_DESCRIPTORS = 1 << 16


def main(place: str, word: str) -> None:
    """Confines this process and starts the program; never returns normally."""
    wanted: LaunchSpec = type(sys.implementation)(**marshal.loads(bytes.fromhex(word)))  # type: ignore[assignment]
    try:
        kernel.control(kernel.PR_SET_PDEATHSIG, _SIGKILL)
        if place == "outside" and int(os.environ.get(PARENT, os.getppid())) != os.getppid():
            os._exit(1)  # the main process ended before the kernel was asked
        if wanted.status_fd != NONE:
            os.set_inheritable(wanted.status_fd, False)
        if place == "inside":
            _be_first_process(wanted)
        elif wanted.backend == LANDLOCK:
            _be_program(wanted)
        else:
            _make_namespaces(wanted)
    except OSError as error:
        _fail(wanted, error)


def _report(wanted: "LaunchSpec", text: str) -> None:
    if wanted.status_fd != NONE:
        os.write(wanted.status_fd, f"{text}\n".encode(errors="replace"))


def _fail(wanted: "LaunchSpec", error: OSError) -> None:
    why = f"the sandbox failed {error}".replace("\n", " ")
    os.write(2 if wanted.status_fd == NONE else wanted.status_fd, f"{why}\n".encode(errors="replace"))
    os._exit(1)


def _make_namespaces(wanted: "LaunchSpec") -> None:
    """Makes the namespaces. A `uid` implies root's rights; otherwise a user namespace gives them."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NAMESPACES | (kernel.CLONE_NEWUSER if wanted.uid == NONE else 0))
    if wanted.uid == NONE:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{_NOBODY} {group} 1")
    launcher = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        _in_namespaces(wanted, launcher)
    _report(wanted, f'{{"child-pid": {child}}}')
    os.closerange(0, _MOST_DESCRIPTORS)
    _, status = os.waitpid(child, 0)
    os._exit(_exit_code(status))


def _in_namespaces(wanted: "LaunchSpec", launcher: int) -> None:
    kernel.control(kernel.PR_SET_PDEATHSIG, _SIGKILL)
    if select.select([launcher], (), (), 0)[0]:
        os._exit(1)  # the launcher ended before the kernel was asked
    files.enter_own_root(wanted)
    _be_first_process(wanted)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _be_first_process(wanted: "LaunchSpec") -> None:
    program = os.fork()
    if program == 0:
        _be_program(wanted)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # a first process receives only the signals that it handles
    _close_all_but(wanted.status_fd, 0)  # the program alone holds its pipes: readers wait for their end
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            total = resource.getrusage(resource.RUSAGE_CHILDREN)
            _report(wanted, f"ended {status} {total.ru_utime + total.ru_stime}")
            os._exit(_exit_code(status))


def _close_all_but(kept: int, first: int) -> None:
    os.closerange(first, kept)
    os.closerange(max(first, kept + 1), _MOST_DESCRIPTORS)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_program(wanted: "LaunchSpec") -> None:
    alone = wanted.backend == LANDLOCK
    content: dict[str, bytes] = {}
    if wanted.status_fd != NONE:  # else it is a module of Shoal, which brings no files and talks to its parent
        with os.fdopen(wanted.files_fd, "rb") as stream:
            content = marshal.load(stream)
        _close_all_but(wanted.status_fd, 3)
    os.umask(0o022)
    os.chdir(wanted.folder or "/")
    if wanted.uid != NONE:
        os.setgroups([])
        os.setresgid(wanted.uid, wanted.uid, wanted.uid)
        os.setresuid(wanted.uid, wanted.uid, wanted.uid)
    for name, data in content.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(data)
    for limit, value in _limits(wanted):
        resource.setrlimit(limit, value)
    kernel.drop_capabilities()
    if alone:
        files.restrict(wanted.readable, wanted.folder)
    kernel.install_filter(seccomp.program_filter(kernel.MACHINE, os.getpid() if alone else None))
    _report(wanted, "started")
    try:
        os.execve(wanted.argv[0], wanted.argv, wanted.environment)
    except (FileNotFoundError, PermissionError) as error:
        os.write(2, f"{wanted.argv[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(NOT_FOUND)


def _limits(wanted: "LaunchSpec") -> list[tuple[int, tuple[int, int]]]:
    """Soft and hard limits; the hard CPU limit is a second later, for programs that ignore the signal."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: kernel.OPEN_FILES,
        resource.RLIMIT_FSIZE: wanted.file_bytes,
    }
    if wanted.memory_bytes:
        limits[resource.RLIMIT_AS] = wanted.memory_bytes
    if wanted.processes and wanted.backend != LANDLOCK:  # under Landlock it would count all processes of the user
        limits[resource.RLIMIT_NPROC] = wanted.processes + (wanted.uid == NONE)  # as is the first process
    cpu = [(resource.RLIMIT_CPU, (wanted.cpu_s, wanted.cpu_s + 1))] if wanted.cpu_s else []
    return [*((limit, (value, value)) for limit, value in limits.items()), *cpu]
