"""Files that a program may reach: in a separate root, or by the rules of Landlock. Runs before the program."""

import ctypes
import os
from collections.abc import Sequence

from shoal.sandbox import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:  # which take milliseconds
    from shoal.sandbox.command import LaunchSpec

OLDEST = 3
"""Version of Landlock (Linux 6.2) from which truncating a file counts as writing."""

_BASE = "/proc"  # the new root is built here: the folder always exists, and nothing in it is bound
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NOSUID, _NODEV = 1, 2, 4

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_FIFO, _MAKE_SYMLINK, _REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_FIFO | _MAKE_SYMLINK
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NET, _SCOPES = 3, 3  # TCP bind and connect; abstract sockets and signals


def enter_own_root(wanted: "LaunchSpec") -> None:
    """Replaces the root by readable paths, the devices, and an empty writable folder or a work tree's top folders."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path in wanted.readable:
        _bind(path, path)
        _add_attributes(_BASE + path, _READ_ONLY | _NOSUID | _NODEV, _AT_RECURSIVE)
    for path in wanted.hidden:
        kernel.mount("tmpfs", _BASE + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | _READ_ONLY, "size=4k")
    for path in kernel.DEVICES:
        _bind(path, path)
    if wanted.tree:
        _bind_tops(wanted)
    elif wanted.folder:
        os.mkdir(_BASE + wanted.folder)
        data = f"mode=0777,size={wanted.file_bytes},nr_inodes={kernel.MOST_FILES}"
        kernel.mount("tmpfs", _BASE + wanted.folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, data)
    if wanted.folder:  # semaphores and shared memory are files there
        shared = wanted.environment.get("TMPDIR", "/tmp") if wanted.tree else wanted.folder
        os.symlink(shared, _BASE + kernel.SHARED_MEMORY)
    _add_attributes(_BASE, _READ_ONLY, 0)
    kernel.enter_root(_BASE)


def _bind_tops(wanted: "LaunchSpec") -> None:
    """Binds the top folders of a work tree, and makes the links among them, such as the /bin of an image.

    The tree's own root is in no program's reach, so no program made one of these links.
    """
    source, merged = wanted.tree, f"{_BASE}/.tree"
    if wanted.layers:
        lower = ":".join(map(_in_options, wanted.layers))
        own = f"upperdir={_in_options(source)}/upper,workdir={_in_options(source)}/work"
        os.mkdir(merged)
        kernel.mount(
            "overlay", merged, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, f"lowerdir={lower},{own},userxattr"
        )
        source = merged
    for name in wanted.tops:
        _bind(f"{source}/{name}", f"/{name}")
        _add_attributes(f"{_BASE}/{name}", _NOSUID | _NODEV, 0)
    for name in os.listdir(source):
        if os.path.islink(f"{source}/{name}") and not os.path.lexists(f"{_BASE}/{name}"):
            os.symlink(os.readlink(f"{source}/{name}"), f"{_BASE}/{name}")
    if wanted.layers:
        kernel.detach(merged)
        os.rmdir(merged)


def _in_options(path: str) -> str:
    """A path in the options of overlayfs."""
    for mark in ("\\", ":", ","):
        path = path.replace(mark, f"\\{mark}")
    return path


def _bind(path: str, place: str) -> None:
    target = _BASE + place
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)


def _add_attributes(path: str, attributes: int, flags: int) -> None:
    """Adds attributes to a mount; removes none."""
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    name = ctypes.c_char_p(os.fsencode(path))
    kernel.syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, name, flags, ctypes.byref(request), 32)


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without Landlock."""
    try:
        return kernel.syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(readable: list[str], folder: str, *, listed: Sequence[str] = (), network: bool = False) -> None:
    """Restricts access to readable paths, the devices and, unless it is "", a writable folder.

    The names below `listed` can be listed. TCP stays allowed with `network`. Raises `OSError`.
    Requires no_new_privs, and binds all descendants as well.
    """
    version = landlock_version()
    if version < OLDEST:
        raise OSError(f"Landlock {OLDEST} (Linux 6.2) or newer is needed, the kernel has {version or 'none'}")
    known = (_TRUNCATE << 1) - 1 | (_DEVICE_IOCTL if version >= 5 else 0)
    denied = (ctypes.c_uint64 * 3)(known, 0 if network or version < 4 else _NET, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8  # an older kernel refuses what it does not know
    ruleset = kernel.syscall("landlock_create_ruleset", _LANDLOCK_CREATE, ctypes.byref(denied), size, 0)
    for path in readable:
        _allow(ruleset, path, _READ if os.path.isdir(path) else _READ & _FOR_FILES)
    for path in listed:
        _allow(ruleset, path, _READ_DIR)
    for path in kernel.DEVICES:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    if folder:
        _allow(ruleset, folder, _READ | _CHANGE | _REFER | _TRUNCATE)
    kernel.syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, accesses: int) -> None:
    """Allows accesses to a file, or to a folder and everything below it."""

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))

    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        request = Beneath(accesses, descriptor)
        kernel.syscall(f"landlock_add_rule {path}", _LANDLOCK_ADD, ruleset, 1, ctypes.byref(request), 0)
    finally:
        os.close(descriptor)
