"""The command line that boxes a program: what a rung needs to know of this machine and this Python."""

import os
import secrets
import shutil
import site
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from shoal.sandbox import launcher
from shoal.sandbox.launch_spec import NONE, LaunchSpec, pack
from shoal.sandbox.mounts import DEVICES
from shoal.sandbox.program import Backend

WORK_FOLDER = "/shoal-work"  # no path that anything readable lies below
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_BOOT = f"import sys; sys.path.append(sys.argv[1]); from {launcher.__name__} import main; main(*sys.argv[2:])"
_NOBODY = "65534"
_UIDS = 1 << 20


@cache
def interpreter() -> str:
    """The Python that programs run on: the one behind this environment, free of links."""
    return os.path.realpath(sys.executable)


@cache
def runtime() -> tuple[str, ...]:
    """What a bare Python needs to read: itself, its standard library and the system's shared libraries."""
    standard_library = os.path.dirname(os.path.realpath(os.__file__))
    own = sorted(str(path) for path in Path(sys.base_prefix, "lib").glob("libpython*.so*"))
    candidates = (*_LIBRARIES, interpreter(), standard_library, *own)
    return tuple(path for path in candidates if os.path.exists(path))


@cache
def installed_packages() -> tuple[Path, ...]:
    """The folders that installed packages are imported from, those of PYTHONPATH and of .pth files included."""
    sites = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return package_folders(sys.path, sites, os.environ.get("PYTHONPATH", ""))


def package_folders(path: Sequence[str], sites: Sequence[str], python_path: str) -> tuple[Path, ...]:
    """Of a `sys.path`, the folders that the user named or installed into: not the current one, nor the script's.

    Python puts what a .pth file names behind the folder that the file lies in.
    """
    first = next((number for number, folder in enumerate(path) if folder in sites), len(path))
    named = [os.path.abspath(folder) for folder in python_path.split(os.pathsep) if folder]
    folders = dict.fromkeys([*named, *sites, *path[first:]])
    return tuple(Path(folder) for folder in folders if os.path.isdir(folder))


@cache
def own_package() -> Path:
    """The folder of `shoal` itself."""
    return Path(__file__).resolve().parents[1]


def visible(*more: Path) -> list[str]:
    """What a program may read: the bare Python and these, which must exist."""
    return outermost([*runtime(), *(str(path.resolve()) for path in more)])


def other_uid() -> int:
    """A user to run one program as, when root starts it: nobody else's, so that it has no rights and is counted alone.

    `NONE` for whoever is not root, or is root where there is nobody else.
    """
    if os.geteuid() != 0:
        return NONE
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges, key=lambda entry: entry[2])
    last = min(first + count, 1 << 31) - 1
    available = min(count // 16, _UIDS)
    return last - secrets.randbelow(available) if available else NONE


def boxed(plan: LaunchSpec, info_fd: int = NONE) -> list[str]:
    """The command that runs a plan. bubblewrap names its child's process on `info_fd`."""
    if plan.backend != Backend.BUBBLEWRAP:
        return _launcher("outside", plan)
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--die-with-parent", "--as-pid-1"]
    if plan.uid == NONE:
        arguments += ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
    else:  # root, who needs no user namespace; the launcher becomes another user and loses these as well
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if info_fd != NONE:
        arguments += ["--info-fd", str(info_fd)]
    launcher = (str(own_package() / "__init__.py"), str(own_package() / "sandbox"))
    paths = outermost((*plan.readable, *launcher))
    for parent in _parents((*paths, *DEVICES)):
        arguments += ["--perms", "0755", "--dir", parent]  # without it, root's are closed to others
    for path in paths:
        arguments += ["--ro-bind", path, path]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    if plan.folder:
        arguments += ["--perms", "0777", "--size", str(plan.file_bytes), "--tmpfs", plan.folder]
    arguments += ["--remount-ro", "/", "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *arguments, "--", *_launcher("inside", plan)]


def _launcher(place: str, plan: LaunchSpec) -> list[str]:
    return [interpreter(), "-I", "-S", "-B", "-c", _BOOT, str(own_package().parent), place, pack(plan)]


def outermost(paths: Sequence[str]) -> list[str]:
    """The paths without those inside another one, each once."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}, key=lambda path: (path.count("/"), path)):
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in kept):
            kept.append(path)
    return kept


def _parents(paths: Sequence[str]) -> list[str]:
    """Every folder above the paths, outer ones first."""
    return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})


def environment_of(variables: Mapping[str, str], packages: Sequence[Path]) -> list[str]:
    """NAME=value of all that a program gets."""
    more = {"PYTHONPATH": os.pathsep.join(map(str, packages))} if packages else {}
    return [f"{name}={value}" for name, value in {**more, **variables}.items()]
