"""File system of a program in namespaces of its own. Runs before the program."""

import os

from shoal.sandbox import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
MOST_FILES = 4096
"""Files and folders allowed in the work folder: each costs kernel memory, however short it is."""

_BASE = "/proc"  # the new root is built here: the folder always exists, and nothing in it is bound


def enter_own_root(readable: list[str], folder: str, size_bytes: int) -> None:
    """Replaces the root by readable paths, the devices and, unless it is "", an empty writable folder."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path in readable:
        _bind(path)
        attributes = kernel.ATTR_READ_ONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
        kernel.set_mount_attributes(_BASE + path, attributes, recursive=True)
    for path in DEVICES:
        _bind(path)
    if folder:
        os.mkdir(_BASE + folder)
        data = f"mode=0777,size={size_bytes},nr_inodes={MOST_FILES}"
        kernel.mount("tmpfs", _BASE + folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, data)
    kernel.set_mount_attributes(_BASE, kernel.ATTR_READ_ONLY, recursive=False)
    kernel.enter_root(_BASE)


def _bind(path: str) -> None:
    target = _BASE + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)
