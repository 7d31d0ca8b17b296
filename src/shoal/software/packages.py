"""Trees of packages with their tests: from a folder, a source distribution, or its name at the package index."""

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import TaskError

MOST_BYTES = 64 << 20
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules", "build", "dist", ".tox"}


def package_tree(source: str) -> tuple[str, dict[str, bytes]]:
    """Name and tree of a folder, a .tar.gz, or a package whose source distribution pip downloads.

    Raises `TaskError`.
    """
    path = Path(source)
    if path.is_dir():
        return path.resolve().name, _checked(source, _of_folder(path))
    if path.is_file():
        return path.name.removesuffix(".tar.gz").removesuffix(".tgz"), _checked(source, _of_archive(path))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps", "-d", folder]
        done = subprocess.run([*command, "--", source], capture_output=True, text=True, check=False)
        archives = sorted(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            said = done.stderr.strip().splitlines()[-1:] or ["it has no .tar.gz"]
            expected = "expected a folder, a .tar.gz or a package with a source distribution"
            raise TaskError(f"{source}: {expected}; pip says: {said[0][:300]}")
        return package_tree(str(archives[0]))


def _checked(source: str, files: Iterator[tuple[str, bytes]]) -> dict[str, bytes]:
    tree: dict[str, bytes] = {}
    left = MOST_BYTES
    for name, content in files:
        tree[name] = content
        if (left := left - len(content)) < 0:
            raise TaskError(f"{source}: expected at most {MOST_BYTES >> 20} MiB of files; take a folder with fewer")
    if not any(name.endswith(".py") for name in tree):
        raise TaskError(f"{source}: expected Python files, found none among {len(tree)}")
    return tree


def _of_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not path.is_symlink() and not _SKIPPED & {*name.parts}:
            yield name.as_posix(), path.read_bytes()


def _of_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files below the archive's one folder."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                _, _, name = member.name.partition("/")
                if member.isfile() and name and ".." not in Path(name).parts and (file := archive.extractfile(member)):
                    yield name, file.read(MOST_BYTES + 1)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TaskError(f"{path}: expected a .tar.gz of a source distribution: {error}") from None
