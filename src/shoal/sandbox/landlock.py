"""File access of a program, restricted by Landlock. Runs before the program."""

import os

from shoal.sandbox import kernel
from shoal.sandbox.mounts import DEVICES

OLDEST = 3
"""Version of Landlock (Linux 6.2) from which truncating a file counts as writing."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_FIFO, _MAKE_SYMLINK, _REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_FIFO | _MAKE_SYMLINK
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NET, _SCOPES = 3, 3  # TCP bind and connect; abstract sockets and signals


def restrict(readable: list[str], folder: str) -> None:
    """Restricts access to readable paths, the devices and, unless it is "", a writable folder. Raises `OSError`."""
    version = kernel.landlock_version()
    if version < OLDEST:
        raise OSError(f"Landlock {OLDEST} (Linux 6.2) or newer is needed, the kernel has {version or 'none'}")
    known = (_TRUNCATE << 1) - 1 | (_DEVICE_IOCTL if version >= 5 else 0)
    ruleset = kernel.landlock_ruleset(known, _NET if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    for path in readable:
        kernel.landlock_allow(ruleset, path, _READ if os.path.isdir(path) else _READ & _FOR_FILES)
    for path in DEVICES:
        kernel.landlock_allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    if folder:
        kernel.landlock_allow(ruleset, folder, _READ | _CHANGE | _REFER | _TRUNCATE)
    kernel.landlock_enter(ruleset)
    os.close(ruleset)
