"""What runs in a sandbox, within which limits, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath

MAIN = "main.py"


class Backend(StrEnum):
    """What a sandbox is built from, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    """The `bwrap` program: namespaces and mounts, set up by code that many eyes have seen."""
    NAMESPACES = "namespaces"
    """The same namespaces and mounts, set up here."""
    LANDLOCK = "landlock"
    """Landlock and seccomp alone, where namespaces are refused: one process; names of files outside can be guessed."""


class Ended(StrEnum):
    """How a program ended."""

    EXITED = "exited"
    """By itself, with an exit code."""
    SIGNALLED = "signalled"
    """By a signal that no limit sent, such as a crash."""
    KILLED_WALL = "killed_wall"
    KILLED_CPU = "killed_cpu"
    KILLED_MEMORY = "killed_memory"
    KILLED_OUTPUT = "killed_output"
    KILLED_PROCESSES = "killed_processes"
    KILLED_FILES = "killed_files"


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What a program may use. What it can be refused, it is refused (an error inside); for the rest it is killed."""

    wall_s: float = 10.0
    """From the program's own start; setting up the sandbox does not count."""
    cpu_s: float = 10.0
    """Of all its processes together."""
    memory_bytes: int = 256 << 20
    """Address space of each process, and resident memory of all together."""
    processes: int = 16
    """Processes and threads together; under `Backend.LANDLOCK` threads only."""
    output_bytes: int = 1 << 20
    """Standard output and standard error together; what came until then is kept."""
    file_bytes: int = 16 << 20
    """Of all files in the work folder together."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name}: expected a number above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Program:
    """Python source or a command, and what it finds in its work folder, which is its current directory.

    >>> Program("print(input())", stdin=b"hello").command
    ('python', '-s', '-S', '-B', '-X', 'utf8', 'main.py')
    """

    source: str | None = None
    """Python; becomes main.py."""
    argv: tuple[str, ...] = ()
    """A command instead; "python" is the interpreter, and nothing else is there but what `readable` brings."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by relative path."""
    stdin: bytes = b""
    packages: tuple[Path, ...] = ()
    """Folders to import from, such as a site-packages."""
    readable: tuple[Path, ...] = ()
    """Files and folders that it may read, under their own path."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole of it, but for PYTHONPATH when there are packages."""

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.argv):
            raise ValueError("Program: expected either source or argv, got both or neither")
        words = (*self.argv, *map(str, self.packages), *map(str, self.readable), *self.files)
        words = (*words, *(f"{name}={value}" for name, value in self.environment.items()))
        if any("\0" in word for word in words):
            raise ValueError("Program: expected text without NUL in argv, paths and environment")
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"Program.files: expected a path inside the work folder, got {name!r}")

    @property
    def command(self) -> tuple[str, ...]:
        """What is executed."""
        return self.argv or ("python", "-s", "-S", "-B", "-X", "utf8", MAIN)

    @property
    def all_files(self) -> Mapping[str, bytes]:
        """The files, and the source as one of them."""
        return self.files if self.source is None else {**self.files, MAIN: self.source.encode(errors="replace")}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended and what it wrote.

    Whatever it printed, it may have printed to deceive: compare outside of the sandbox.
    """

    ended: Ended
    exit_code: int | None
    """When it exited."""
    signal: int | None
    """When it was signalled."""
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float
    backend: Backend

    @property
    def ok(self) -> bool:
        """Whether it exited with code 0."""
        return self.ended is Ended.EXITED and self.exit_code == 0
