"""Launch specification, passed to the launcher as one command-line word; and the program's files as one byte stream."""

BUBBLEWRAP, NAMESPACES, LANDLOCK = "bubblewrap", "namespaces", "landlock"
NONE = -1


class LaunchSpec:
    """Specification of one program's sandbox and start."""

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
        """A limit of 0 means no limit.

        `folder` is the only writable place: a mount point in the sandbox, an existing folder under Landlock, or "" for
        none. `uid` is the user id of the program; `NONE` keeps the starter's. `environment` holds NAME=value.
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


def pack(spec: LaunchSpec) -> str:
    """Specification as one word; `unpack` reads it."""
    words: list[str] = []
    for name in LaunchSpec.__slots__:
        value = getattr(spec, name)
        words += [str(len(value)), *value] if name in _LISTS else [str(value)]
    return "\0".join(words).encode(errors="surrogateescape").hex()


def unpack(word: str) -> LaunchSpec:
    """Specification that `pack` encoded."""
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
    """Paths and contents of a stream."""
    files, at = [], 0
    while at < len(stream):
        name_end = stream.index(b"\0", at)
        size_end = stream.index(b"\0", name_end + 1)
        size = int(stream[name_end + 1 : size_end])
        content = stream[size_end + 1 : size_end + 1 + size]
        files.append((stream[at:name_end].decode(errors="surrogateescape"), content))
        at = size_end + 1 + size
    return files
