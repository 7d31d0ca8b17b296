"""Calls that only the kernel offers: namespaces, mounts, capabilities, Landlock, seccomp.

Modules that run before the program, such as this one, import nothing that takes milliseconds (no dataclasses, enum, re,
json, typing). Each program waits for them.
"""

import ctypes
import os

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_READ_ONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2

MACHINE = os.uname().machine
_PIVOT_ROOT, _CAPSET = {"aarch64": (41, 91)}.get(MACHINE, (155, 126))
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION = 0x2008_0522
_LANDLOCK_VERSION = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    """Result of a call. Raises `OSError` naming the call when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: object) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(what, int(_libc.syscall(ctypes.c_long(number), *words)))


def unshare(flags: int) -> None:
    """Moves this process (for process namespaces: its children) into new namespaces."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Calls mount(2)."""
    words = [os.fsencode(word) for word in (source, target, kind, data)]
    _checked(f"mount {target}", _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def set_mount_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    """Adds attributes to a mount and, when recursive, to all mounts below it; removes none."""
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    name = ctypes.c_char_p(os.fsencode(path))
    _syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, name, flags, ctypes.byref(request), 32)


def enter_root(path: str) -> None:
    """Makes the mount at `path` the root, and the old root unreachable."""
    os.chdir(path)
    here = ctypes.c_char_p(b".")
    _syscall("pivot_root", _PIVOT_ROOT, here, here)
    _checked("umount", _libc.umount2(b".", MNT_DETACH))
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
    _syscall("capset", _CAPSET, ctypes.byref(header), ctypes.byref(none))


def install_filter(instructions: bytes) -> None:
    """Installs a seccomp filter on this process and its descendants. Requires no_new_privs."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    request = Filter(len(instructions) // 8, instructions)
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(request), 0, 0)
    _checked("seccomp", result)


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without Landlock."""
    try:
        return _syscall("landlock", _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    except OSError:
        return 0


def landlock_ruleset(files: int, net: int, scoped: int) -> int:
    """Descriptor of a ruleset that denies these accesses; pass 0 for accesses that the kernel does not know."""
    size = 24 if scoped else 16 if net else 8
    request = (ctypes.c_uint64 * 3)(files, net, scoped)
    return _syscall("landlock_create_ruleset", _LANDLOCK_CREATE, ctypes.byref(request), size, 0)


def landlock_allow(ruleset: int, path: str, files: int) -> None:
    """Allows accesses to a file, or to a folder and everything below it."""

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))

    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        request = Beneath(files, descriptor)
        _syscall(f"landlock_add_rule {path}", _LANDLOCK_ADD, ruleset, 1, ctypes.byref(request), 0)
    finally:
        os.close(descriptor)


def landlock_enter(ruleset: int) -> None:
    """Applies the ruleset to this process and its descendants. Requires no_new_privs."""
    _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
