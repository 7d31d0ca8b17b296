"""Command line that runs a program in a sandbox: the facts of this machine and this Python that a backend needs."""

import marshal
import math
import os
import secrets
import shutil
import site
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from shoal.sandbox.kernel import DEVICES, NONE, SHARED_MEMORY
from shoal.sandbox.program import Backend, Program, ProgramLimits

WORK_FOLDER = "/shoal-work"  # no readable file lies below this path
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_SYSTEM = tuple(
    path
    for path in ("/bin", "/usr", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
    if os.path.exists(path)
)
"""Paths that commands in a work tree read as well, such as a shell; none has a secret of the machine."""
_BOOT = "import sys; sys.path.append(sys.argv[1]); from shoal.sandbox.launcher import main; main(*sys.argv[2:])"
_NOBODY = "65534"
_UIDS = 1 << 20


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Specification of one program's sandbox and start, for the launcher. A limit of 0 means no limit."""

    backend: str
    argv: list[str]
    environment: dict[str, str]
    readable: list[str]
    folder: str
    """The only writable place: a mount point in the sandbox, an existing folder under Landlock, or "" for none."""
    uid: int
    """User id of the program; `NONE` keeps the starter's."""
    status_fd: int
    """Pipe for the launcher's reports; `NONE` for a module of Shoal, which talks to its parent itself."""
    files_fd: int
    """Marshalled files of the program, path to content."""
    cpu_s: int
    memory_bytes: int
    processes: int
    file_bytes: int
    tree: str
    """The host's folder of a work tree, or "" for an empty folder."""
    layers: list[str]
    tops: list[str]
    hidden: list[str]
    """Folders below readable ones that appear empty."""


def launch_spec(
    backend: Backend, program: Program, limits: ProgramLimits, folder: str, status_fd: int, files_fd: int
) -> LaunchSpec:
    """Launch specification of a program."""
    first, *rest = program.command
    tree, named = program.tree, [str(path.resolve()) for path in program.packages]
    readable = visible(*program.packages)
    if tree is not None:
        readable = outermost(named if tree.has_system else [*readable, *_SYSTEM])
    keeps_user = tree is not None or backend is Backend.LANDLOCK
    keeps_user = keeps_user or not all(map(_open_to_others, [*readable, str(own_package())]))
    taken = [*readable, *DEVICES, *([str(own_package())] if backend is Backend.BUBBLEWRAP else [])]
    packages = {"PYTHONPATH": os.pathsep.join(map(str, program.packages))} if program.packages else {}
    return LaunchSpec(
        backend=backend.value,
        argv=[interpreter() if first == "python" else first, *rest],
        environment={**packages, **program.environment},
        readable=readable,
        folder=folder,
        uid=NONE if keeps_user else other_uid(),
        status_fd=status_fd,
        files_fd=files_fd,
        cpu_s=math.ceil(limits.cpu_s),
        memory_bytes=limits.memory_bytes,
        processes=limits.processes,
        file_bytes=limits.file_bytes,
        tree=str(tree.folder) if tree is not None else "",
        layers=[str(layer) for layer in tree.layers] if tree is not None else [],
        tops=[name for name in tree.tops if _is_free(name, taken)] if tree is not None else [],
        hidden=[] if tree is None or tree.has_system else [one for one in _installed_beside() if one not in named],
    )


def _is_free(name: str, taken: Sequence[str]) -> bool:
    """Whether no path of the sandbox's own lies below a top folder's place, which would hide the path."""
    return not any(f"{path}/".startswith(f"/{name}/") for path in taken)


@cache
def _installed_beside() -> tuple[str, ...]:
    """Folders of installed packages below the system's readable folders: they may have a task's own package, mended."""
    roots = [Path(os.path.realpath(os.__file__)).parent, *Path("/usr").glob("lib/python3*")]
    roots += Path("/usr/local").glob("lib/python3*")
    found = [root / name for root in roots for name in ("site-packages", "dist-packages")]
    return tuple(outermost([str(folder) for folder in found if folder.is_dir() and not folder.is_symlink()]))


def module_command(backend: Backend, module: Program) -> list[str]:
    """Command that runs a module of Shoal in a sandbox with namespaces, without a time limit.

    The module keeps the descriptors it inherits, limits itself, and has an empty `WORK_FOLDER`. The parent enforces its
    time and kills its whole process group. A sandbox that cannot be set up ends with code 1 and reports the reason on
    standard error.
    """
    spec = launch_spec(backend, module, ProgramLimits(), WORK_FOLDER, NONE, NONE)
    return boxed(replace(spec, cpu_s=0, memory_bytes=0, processes=0))


@cache
def interpreter() -> str:
    """Python interpreter for programs: the one behind this environment, with links resolved."""
    return os.path.realpath(sys.executable)


@cache
def runtime() -> tuple[str, ...]:
    """Paths that a bare Python reads: the interpreter, its standard library and the system's shared libraries."""
    standard_library = os.path.dirname(os.path.realpath(os.__file__))
    own = sorted(str(path) for path in Path(sys.base_prefix, "lib").glob("libpython*.so*"))
    candidates = (*_LIBRARIES, interpreter(), standard_library, *own)
    return tuple(path for path in candidates if os.path.exists(path))


@cache
def installed_packages() -> tuple[Path, ...]:
    """Folders from which installed packages are imported, including those of PYTHONPATH and .pth files."""
    sites = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return package_folders(sys.path, sites, os.environ.get("PYTHONPATH", ""))


def package_folders(path: Sequence[str], sites: Sequence[str], python_path: str) -> tuple[Path, ...]:
    """Folders of a `sys.path` that the user named or installed into, without the current folder and the script's.

    Python places the entries of a .pth file after the folder that contains the file.
    """
    first = next((number for number, folder in enumerate(path) if folder in sites), len(path))
    named = [os.path.abspath(folder) for folder in python_path.split(os.pathsep) if folder]
    folders = dict.fromkeys([*named, *sites, *path[first:]])
    return tuple(Path(folder) for folder in folders if os.path.isdir(folder))


@cache
def own_package() -> Path:
    """Folder of the package `shoal`."""
    return Path(__file__).resolve().parents[1]


def visible(*more: Path) -> list[str]:
    """Paths that a program may read: the bare Python and `more`, which must exist."""
    return outermost([*runtime(), *(str(path.resolve()) for path in more)])


def _open_to_others(path: str) -> bool:
    """Whether any user may read a path; only root may read what it installed under umask 077.

    A missing path counts as open: the backend names it.
    """
    if not os.path.exists(path):
        return True
    mode = os.stat(path).st_mode
    return mode & 0o5 == 0o5 if stat.S_ISDIR(mode) else bool(mode & 0o4)


def other_uid() -> int:
    """Unused user id to run one program as root's child, so that the program has no rights and is counted alone.

    The result is `NONE` when this process is not root, or when root has no other user ids.
    """
    if os.geteuid() != 0:
        return NONE
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges, key=lambda entry: entry[2])
    last = min(first + count, 1 << 31) - 1
    available = min(count // 16, _UIDS)
    return last - secrets.randbelow(available) if available else NONE


def boxed(spec: LaunchSpec, info_fd: int = NONE) -> list[str]:
    """Command that runs a launch specification. bubblewrap writes its child's process id to `info_fd`."""
    if spec.backend != Backend.BUBBLEWRAP:
        return _launcher("outside", spec)
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--die-with-parent", "--as-pid-1"]
    if spec.uid == NONE:
        arguments += ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
    else:  # root needs no user namespace; the launcher drops these capabilities when it changes user
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if info_fd != NONE:
        arguments += ["--info-fd", str(info_fd)]
    launcher = (str(own_package() / "__init__.py"), str(own_package() / "sandbox"))
    paths = outermost((*spec.readable, *launcher))
    for parent in _parents((*paths, *DEVICES)):
        arguments += ["--perms", "0755", "--dir", parent]  # root's umask would close these folders to others
    for path in paths:
        arguments += ["--ro-bind", path, path]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    for path in spec.hidden:
        arguments += ["--tmpfs", path, "--remount-ro", path]
    for name in spec.tops:
        arguments += ["--bind", f"{spec.tree}/{name}", f"/{name}"]
    if spec.folder and not spec.tree:
        arguments += ["--perms", "0777", "--size", str(spec.file_bytes), "--tmpfs", spec.folder]
    if spec.folder:
        shared = spec.environment.get("TMPDIR", "/tmp") if spec.tree else spec.folder
        arguments += ["--symlink", shared, SHARED_MEMORY]
    arguments += ["--remount-ro", "/", "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *arguments, "--", *_launcher("inside", spec)]


def _launcher(place: str, spec: LaunchSpec) -> list[str]:
    return [
        interpreter(),
        "-I",
        "-S",
        "-B",
        "-c",
        _BOOT,
        str(own_package().parent),
        place,
        marshal.dumps(asdict(spec)).hex(),
    ]


def outermost(paths: Sequence[str]) -> list[str]:
    """Paths without duplicates and without paths inside another."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}, key=lambda path: (path.count("/"), path)):
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in kept):
            kept.append(path)
    return kept


def _parents(paths: Sequence[str]) -> list[str]:
    """Folders above the paths, outer ones first."""
    return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
