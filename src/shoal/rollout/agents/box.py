"""Box for a command that runs the model's commands: limits the files that its process tree reads and writes.

All of them share one folder, which goes with the rollout. They read the system's programs and what the settings name,
and write nothing else. Landlock keeps them from the memory, descriptors and variables of all other processes.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.sandbox import files, kernel, seccomp
from shoal.sandbox.command import installed_packages, outermost, visible

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/opt", "/nix", "/proc", "/sys")
_FOLDERS_IN = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of a command's environment whose paths it reads."""
_SITES = {"site-packages", "dist-packages"}


def why_not() -> str:
    """Reason why this machine has no boxes; empty where it has."""
    if sys.platform != "linux":
        return "it needs Linux"
    if (version := files.landlock_version()) < files.OLDEST:
        return f"it needs Landlock {files.OLDEST} (Linux 6.2), the kernel has {version or 'none'}"
    try:
        seccomp.agent_filter(kernel.MACHINE)
    except ValueError as error:
        return f"machine: {error}"
    return ""


def readable(command: Sequence[str], reads: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Paths that a boxed command reads: the system's, Python's, the files of its words, and `reads`."""
    named = [path for name in _FOLDERS_IN for path in environment.get(name, "").split(os.pathsep)]
    sources = _sources(command)
    packages = [path for folder in sources for path in _importable(folder)]
    paths = [*_SYSTEM, sys.prefix, *_program(command[0]), *reads, *packages, *filter(os.path.isabs, (*named, *command))]
    found = (os.path.realpath(path) for path in paths if os.path.exists(path))
    return outermost([*visible(*(folder for folder in installed_packages() if folder not in sources)), *found])


def listed(command: Sequence[str]) -> list[str]:
    """Folders whose names a boxed command lists, as Python's import does, without reading all of their files."""
    return [str(folder.resolve()) for folder in _sources(command)]


def _sources(command: Sequence[str]) -> list[Path]:
    """Folders of Python scripts, of PYTHONPATH and of editable installs.

    They may be a project's, with its tasks and runs.
    """
    scripts = [Path(word).parent for word in command[1:] if os.path.isabs(word) and word.endswith(".py")]
    return [*scripts, *(folder for folder in installed_packages() if not _SITES & set(folder.parts))]


def _program(name: str) -> list[str]:
    """File that a program's name leads to through links, and the folder of its package, as npm, pipx and venv lay them.

    An environment's interpreter is a link to another interpreter; the packages belong to the link.
    """
    place = Path(os.path.abspath(shutil.which(name) or name))
    found = place.resolve()
    marks = ("package.json", "pyvenv.cfg")
    folders = (*place.parents[:2], *found.parents[:3])
    packages = [str(folder) for folder in folders if any((folder / mark).is_file() for mark in marks)]
    library = found.parents[1] / "lib" / found.name
    return [str(found), *packages, *([str(library)] if library.is_dir() else [])]


def _importable(folder: Path) -> list[str]:
    """Modules and packages of a folder; a folder without `__init__.py` is no package here."""
    return [str(one) for one in folder.iterdir() if one.suffix in (".py", ".so") or (one / "__init__.py").is_file()]


def absolute(command: Sequence[str]) -> list[str]:
    """The command with absolute paths for its words that name files, since it does not run in the run's folder."""
    first, *rest = command
    first = os.path.abspath(first) if "/" in first else first
    return [first, *(os.path.abspath(word) if os.path.isfile(word) else word for word in rest)]
