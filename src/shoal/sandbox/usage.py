"""Resource usage of a sandbox's processes, measured from outside."""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """Whether the files below a folder exceed a size or number. Follows no links; stops early."""
    waiting = [folder]
    while waiting:
        with suppress(FileNotFoundError, PermissionError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
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
