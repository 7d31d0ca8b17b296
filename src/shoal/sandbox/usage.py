"""What the processes of a sandbox use, seen from outside of it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LONGEST_PATH = 2048
"""A work folder nested deeper than this is as bad as one that is full."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Of a process and all that came from it."""

    cpu_s: float
    memory_bytes: int
    """Resident; pages that processes share are counted for each of them."""
    tasks: int
    """Processes and threads."""
    pids: tuple[int, ...]


def usage_of(root: int) -> ResourceUsage:
    """Of the process `root`, its children, and so on; what ends meanwhile may be missed."""
    cpu_s, memory_bytes, tasks = 0.0, 0, 0
    pids, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):
            # After the name, which may hold anything: state is field 3 of proc(5).
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ended_children = fields[13:15] if pid == root else ()
            cpu_s += sum(map(int, (*fields[11:13], *ended_children))) / _TICKS_PER_S
            tasks += int(fields[17])
            memory_bytes += int(fields[21]) * _PAGE_BYTES
            pids.append(pid)
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return ResourceUsage(cpu_s, memory_bytes, tasks, tuple(pids))


def unshared_bytes(pids: tuple[int, ...]) -> int:
    """Resident memory of these processes, shared pages counted once between them; the larger sum where it is hidden."""
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
    """Whether the files below a folder are larger or more than this. Follows no links; stops where it knows."""
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


def remove_tree(folder: str) -> None:
    """Removes a folder that a program filled as it pleased: however deep, and whatever modes it set."""
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
                os.rename(entry.path, target)  # up, so that no path grows and no recursion is needed
                waiting.append(target)
            else:
                os.unlink(entry.path)
        os.rmdir(place)
