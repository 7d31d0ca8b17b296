"""Programs in a sandbox, their limits and their results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath

MAIN = "main.py"


class Backend(StrEnum):
    """Sandbox backends, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    """Namespaces and mounts, set up by the widely reviewed program `bwrap`."""
    NAMESPACES = "namespaces"
    """Namespaces and mounts, set up by Shoal's launcher."""
    LANDLOCK = "landlock"
    """Landlock and seccomp alone, where namespaces are refused: one process; names of files outside can be guessed."""


class Ended(StrEnum):
    """Ways in which a program ends."""

    EXITED = "exited"
    """The program exited by itself, with an exit code."""
    SIGNALLED = "signalled"
    """A signal that no limit sent, such as a crash, ended the program."""
    KILLED_WALL = "killed_wall"
    KILLED_CPU = "killed_cpu"
    KILLED_IDLE = "killed_idle"
    KILLED_MEMORY = "killed_memory"
    KILLED_OUTPUT = "killed_output"
    KILLED_PROCESSES = "killed_processes"
    KILLED_FILES = "killed_files"


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of a program. Where possible, exceeding a limit is an error inside; otherwise the program is killed."""

    wall_s: float = 10.0
    """Seconds from the program's own start; setting up the sandbox does not count."""
    cpu_s: float = 10.0
    """Seconds of all its processes together."""
    idle_s: float = math.inf
    """Seconds in which none of its threads runs or could run, in all; a busy machine does not add to them."""
    memory_bytes: int = 256 << 20
    """Bytes of address space for each process, and of resident memory for all together."""
    processes: int = 16
    """Processes and threads together; under `Backend.LANDLOCK` threads only."""
    output_bytes: int = 1 << 20
    """Bytes of standard output and standard error together; output up to the limit is kept."""
    file_bytes: int = 16 << 20
    """Bytes of all files in the work folder together."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name}: expected a number above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class WorkTree:
    """Tree of files that programs work in, in place of an empty folder, and that outlives them.

    Each of its top folders is a folder of the sandbox's root. A program cannot replace a top folder, so no path that
    the host opens leads through a link of the program.
    """

    folder: Path
    """The whole tree; with `layers`, the folder with `upper` (what programs changed) and `work`, of overlayfs."""
    tops: tuple[str, ...]
    """Names of the top folders."""
    current: str
    """The program's current directory, below a top folder."""
    layers: tuple[Path, ...] = ()
    """Read-only layers under what programs changed, the topmost first; they need `Backend.NAMESPACES`."""
    held_bytes: int = 0
    held_files: int = 0
    """Size and number of files that the folder began with; limits count what came after."""
    has_system: bool = False
    """Whether the tree has a system's programs and libraries, so that those of this machine stay outside."""

    @property
    def changed(self) -> Path:
        """Folder whose size the limits bound."""
        return self.folder / "upper" if self.layers else self.folder


@dataclass(frozen=True, slots=True)
class Program:
    """Python source or a command, and its files in the work folder, which is its current directory.

    >>> Program("print(input())", stdin=b"hello").command
    ('python', '-s', '-S', '-B', '-X', 'utf8', 'main.py')
    """

    source: str | None = None
    """Python source; becomes main.py."""
    argv: tuple[str, ...] = ()
    """Command in place of source; "python" is the interpreter, and there are no other programs."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content of files by relative path."""
    stdin: bytes = b""
    packages: tuple[Path, ...] = ()
    """Folders to import from, such as a site-packages."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Whole environment; packages add PYTHONPATH."""
    tree: WorkTree | None = None
    """None stands for an empty work folder, which is gone after the program."""

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.argv):
            raise ValueError("Program: expected either source or argv, got both or neither")
        words = (*self.argv, *map(str, self.packages), *self.files)
        words = (*words, *(f"{name}={value}" for name, value in self.environment.items()))
        if any("\0" in word for word in words):
            raise ValueError("Program: expected text without NUL in argv, paths and environment")
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"Program.files: expected a path inside the work folder, got {name!r}")

    @property
    def command(self) -> tuple[str, ...]:
        """Command that is executed."""
        return self.argv or ("python", "-s", "-S", "-B", "-X", "utf8", MAIN)

    @property
    def all_files(self) -> Mapping[str, bytes]:
        """Files, including the source."""
        return self.files if self.source is None else {**self.files, MAIN: self.source.encode(errors="replace")}


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program and its output.

    Output may be printed to deceive: compare it outside the sandbox.
    """

    ended: Ended
    exit_code: int | None
    """Exit code, if the program exited."""
    signal: int | None
    """Number of the signal, if a signal ended the program."""
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float
    backend: Backend

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0."""
        return self.ended is Ended.EXITED and self.exit_code == 0
