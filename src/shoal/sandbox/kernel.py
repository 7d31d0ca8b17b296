"""System calls without a Python wrapper, and constants shared by both sides of a launch.

Modules that run before the program, such as this one, import nothing that takes milliseconds (no dataclasses, enum, re,
json, typing). Each program waits for them.
"""

import ctypes
import os

CLONE_NEWUSER = 0x1000_0000
NAMESPACES = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x2000_0000 | 0x4000_0000
"""New namespaces of mounts, control groups, host names, message queues, processes and networks."""

PARENT = "SHOAL_PARENT_PID"
LANDLOCK = "landlock"
NONE = -1
"""Stands for no descriptor, and for the starter's own user id."""
OPEN_FILES = 64
MOST_FILES = 4096
"""Files and folders allowed in the work folder: each costs kernel memory, however short it is."""
MOST_TREE_FILES = 65_536
"""Files and folders that programs may add to a work tree."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

SHARED_MEMORY = "/dev/shm"
"""Link to the work folder, so that shared memory and locks of programs are their own and count as their files."""

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER, _MNT_DETACH = 2, 2

MACHINE = os.uname().machine
_PIVOT_ROOT, _CAPSET = {"aarch64": (41, 91)}.get(MACHINE, (155, 126))
_CAPABILITY_VERSION = 0x2008_0522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    """Result of a call. Raises `OSError` naming the call when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """Result of a system call by number. Raises `OSError` naming the call when it fails."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(what, int(_libc.syscall(ctypes.c_long(number), *words)))


def unshare(flags: int) -> None:
    """Moves this process (for process namespaces: its children) into new namespaces."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Calls mount(2)."""
    words = [os.fsencode(word) for word in (source, target, kind, data)]
    _checked(f"mount {target}", _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def detach(path: str) -> None:
    """Removes the mount at `path`; mounts made from it stay."""
    _checked(f"umount {path}", _libc.umount2(os.fsencode(path), _MNT_DETACH))


def enter_root(path: str) -> None:
    """Makes the mount at `path` the root, and the old root unreachable."""
    os.chdir(path)
    here = ctypes.c_char_p(b".")
    syscall("pivot_root", _PIVOT_ROOT, here, here)
    detach(".")
    os.chdir("/")


def control(option: int, value: int = 0) -> None:
    """Calls prctl(2)."""
    zero = ctypes.c_ulong(0)
    _checked(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def drop_capabilities() -> None:
    """Drops every capability, permanently."""
    for capability in range(64):
        try:
            control(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one, or not allowed: no_new_privs keeps dropped ones from returning
            break
    control(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    syscall("capset", _CAPSET, ctypes.byref(header), ctypes.byref(none))


def install_filter(instructions: bytes) -> None:
    """Installs a seccomp filter on this process and its descendants. Requires no_new_privs."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    request = Filter(len(instructions) // 8, instructions)
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(request), 0, 0)
    _checked("seccomp", result)
