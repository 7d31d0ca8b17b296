"""Confinement of a process that reads untrusted text: it drops every right that scoring does not need.

The worker starts in a sandbox with namespaces where the machine has one (`--boxed`). Elsewhere it drops system calls,
capabilities and, with Landlock, files before the first answer. In both cases it gives up environment,
inherited files, writing to files, new processes and memory beyond a limit. An audit hook refuses the remaining ways out
of Python code.
"""

import os
import resource
import sys

from shoal.sandbox import files, kernel, seccomp
from shoal.sandbox.command import installed_packages, own_package, visible

MEMORY_BYTES = 2 << 30
"""Bytes of the process's address space."""
_REFUSED = (
    *("os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link", "os.mkdir"),
    *("os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.spawn", "os.symlink", "os.system"),
    *("os.truncate", "os.utime", "ctypes.", "pty.", "shutil.", "socket.", "subprocess.", "sys.settrace"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(*, boxed: bool, sets_variables: bool = False) -> None:
    """Drops every right that scoring does not need; with `boxed` the process is already in a sandbox.

    Some libraries set environment variables on import; `sets_variables` allows it.
    """
    os.environ.clear()
    os.environ["PYTHONHASHSEED"] = "0"  # states what this process was started with
    sys.dont_write_bytecode = True
    os.chdir("/")
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: kernel.OPEN_FILES,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    nowhere = os.open(os.devnull, os.O_RDWR)  # after the limits, which may be refused: the log then says so
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    if not boxed:
        _enter_sandbox()
    sys.addaudithook(_refuse if not sets_variables else _refuse_but_variables)


def _enter_sandbox() -> None:
    """Restricts this process by the kernel: system calls always, files if it has Landlock."""
    kernel.drop_capabilities()
    if files.landlock_version() >= files.OLDEST:
        files.restrict(visible(own_package(), *installed_packages()), "")
    kernel.install_filter(seccomp.program_filter(kernel.MACHINE, os.getpid()))


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused while scoring")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
        raise PermissionError("writing to files is refused while scoring")


def _refuse_but_variables(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("os.putenv", "os.unsetenv"):
        _refuse(event, arguments)
