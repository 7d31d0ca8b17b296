"""What the main process tells the launcher, as one word of a command line; and the files, as one stream of bytes."""

BUBBLEWRAP, NAMESPACES, LANDLOCK = "bubblewrap", "namespaces", "landlock"
NONE = -1


class LaunchSpec:
    """How one program is to be boxed and started."""

    __slots__ = (
        *(
            "argv",
            "cpu_s",
            "environment",
            "file_bytes",
            "files_fd",
            "folder",
            "memory_bytes",
            "open_files",
            "processes",
        ),
        *("readable", "backend", "status_fd", "uid"),
    )

    def __init__(
        self,
        *,
        backend: str,
        argv: list[str],
        environment: list[str],
        readable: list[str],
        folder: str,
        uid: int,
        status_fd: int,
        files_fd: int,
        cpu_s: int,
        memory_bytes: int,
        processes: int,
        file_bytes: int,
        open_files: int,
    ) -> None:
        """A limit of 0 is none.

        `folder` is where the program may write: a mount point in the sandbox, under Landlock a folder that exists;
        empty when it may write nowhere. `uid` is whom it runs as, `NONE` for whoever starts it. `environment` holds
        NAME=value.
        """
        self.backend = backend
        self.argv = argv
        self.environment = environment
        self.readable = readable
        self.folder = folder
        self.uid = uid
        self.status_fd = status_fd
        self.files_fd = files_fd
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.file_bytes = file_bytes
        self.open_files = open_files


_LISTS = ("argv", "environment", "readable")
_WORDS = ("backend", "folder")


def pack(plan: LaunchSpec) -> str:
    """The plan as one word; `unpack` reads it."""
    words: list[str] = []
    for name in LaunchSpec.__slots__:
        value = getattr(plan, name)
        words += [str(len(value)), *value] if name in _LISTS else [str(value)]
    return "\0".join(words).encode(errors="surrogateescape").hex()


def unpack(word: str) -> LaunchSpec:
    """The plan that `pack` was given."""
    words = iter(bytes.fromhex(word).decode(errors="surrogateescape").split("\0"))
    values: dict[str, object] = {}
    for name in LaunchSpec.__slots__:
        first = next(words)
        if name in _LISTS:
            values[name] = [next(words) for _ in range(int(first))]
        else:
            values[name] = first if name in _WORDS else int(first)
    return LaunchSpec(**values)  # type: ignore[arg-type]  # as packed


def pack_files(files: dict[str, bytes]) -> bytes:
    """Paths and contents as one stream; `unpack_files` reads it."""
    parts = [b"%b\0%d\0%b" % (name.encode(errors="surrogateescape"), len(data), data) for name, data in files.items()]
    return b"".join(parts)


def unpack_files(stream: bytes) -> list[tuple[str, bytes]]:
    """Paths and contents."""
    files, at = [], 0
    while at < len(stream):
        name_end = stream.index(b"\0", at)
        size_end = stream.index(b"\0", name_end + 1)
        size = int(stream[name_end + 1 : size_end])
        content = stream[size_end + 1 : size_end + 1 + size]
        files.append((stream[at:name_end].decode(errors="surrogateescape"), content))
        at = size_end + 1 + size
    return files
