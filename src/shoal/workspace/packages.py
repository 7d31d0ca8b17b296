"""Packages that commands of a workspace import: copies of a few installed ones, without any other of this machine."""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from shoal.errors import TaskError
from shoal.workspace.tree import trees_directory

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def installed(*names: str) -> Path:
    """Folder with copies of installed packages and what they need; made once.

    Nothing else is in it, so a task's own package, as it is installed here, is not. Raises `TaskError`.
    """
    found = _with_needs(names)
    listed = "\n".join(sorted(f"{name}=={one.version}" for name, one in found.items()))
    folder = trees_directory() / "packages" / hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        for one in found.values():
            for file in one.files or ():
                source = Path(str(file.locate()))
                if ".." not in file.parts and source.is_file():
                    (made / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, made / file)
        made.chmod(0o755)
        if not folder.is_dir():
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _with_needs(names: Sequence[str]) -> dict[str, Distribution]:
    """Distributions by name, with those that they require without an extra."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:
            if name in names:
                raise TaskError(f"workspace packages: expected the installed package {name}, found none") from None
            continue  # a requirement of another system or Python
        for requirement in found[key].requires or ():
            if "extra ==" not in requirement and (match := _NAME.match(requirement)):
                waiting.append(match[0])
    return found
