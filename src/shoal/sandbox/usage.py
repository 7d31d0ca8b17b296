"""Resource usage of a sandbox's processes, measured from outside."""

import os
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shoal.sandbox import kernel

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LONGEST_PATH = 2048
"""Characters; a deeper work folder counts as full."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources used by a process and its descendants."""

    cpu_s: float
    memory_bytes: int
    """Resident bytes; shared pages count for each process."""
    tasks: int
    """Processes and threads."""
    is_ready: bool
    """True if one of them runs, or waits for a processor alone."""
    pids: tuple[int, ...]


def usage_of(root: int) -> ResourceUsage:
    """Usage of the process `root` and its descendants; a process that ends meanwhile may be missed."""
    cpu_s, memory_bytes, tasks, is_ready = 0.0, 0, 0, False
    pids, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):
            # Fields are counted after the name, which may hold anything: state is field 3 of proc(5).
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ended_children = fields[13:15] if pid == root else ()
            cpu_s += sum(map(int, (*fields[11:13], *ended_children))) / _TICKS_PER_S
            tasks += int(fields[17])
            memory_bytes += int(fields[21]) * _PAGE_BYTES
            pids.append(pid)
            for task in os.listdir(f"/proc/{pid}/task"):
                state = Path(f"/proc/{pid}/task/{task}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
                is_ready = is_ready or state == "R"
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return ResourceUsage(cpu_s, memory_bytes, tasks, is_ready, tuple(pids))


def unshared_bytes(pids: tuple[int, ...]) -> int:
    """Resident bytes of these processes, counting shared pages once; where that is hidden, the larger plain sum."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            except (OSError, StopIteration):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return total


def folder_holds_more(folder: str, size_bytes: int, count: int) -> bool:
    """Whether the files below a folder exceed a size or number. Follows no links; stops early.

    Where a program took its folders' rights, another process looks, which has all rights over this user's files; where
    that cannot be, the folder counts as full.
    """
    try:
        return _holds_more(folder, size_bytes, count)
    except PermissionError:
        command = (sys.executable, "-I", "-S", "-c", _LOOK, _SOURCES, folder, str(size_bytes), str(count))
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0


_SOURCES = str(Path(__file__).parents[2])
_LOOK = """import sys
sys.path.insert(0, sys.argv[1])
from shoal.sandbox.usage import look
look(sys.argv[2], *map(int, sys.argv[3:]))"""


def look(folder: str, size_bytes: int, count: int) -> NoReturn:
    """Ends this process: with 0 where the files below a folder do not exceed a size or number."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    sys.exit(_holds_more(folder, size_bytes, count))


def _holds_more(folder: str, size_bytes: int, count: int) -> bool:
    """Raises `PermissionError` for a folder that cannot be looked into."""
    waiting = [folder]
    while waiting:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                size_bytes -= status.st_blocks * 512
                count -= 1
                if size_bytes < 0 or count < 0 or len(entry.path) > _LONGEST_PATH:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return False


def left_in(path: Path, most_bytes: int) -> bytes | None:
    """The first bytes of a file that a program left; None for a link, a folder, a pipe, or no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the program decides what is there
        return None
    try:
        return os.read(descriptor, most_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def remove_tree(folder: str) -> None:
    """Removes a folder that a program filled, at any depth and with any modes."""
    moved = 0
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        os.chmod(place, 0o700)
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                target = os.path.join(os.path.dirname(folder), f"{os.path.basename(folder)}-{moved}")
                moved += 1
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, target)  # moved up, so that no path grows and no recursion is needed
                waiting.append(target)
            else:
                os.unlink(entry.path)
        os.rmdir(place)
