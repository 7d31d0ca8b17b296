"""A Version on disk: published in one rename, recognised by its checksum.

    <run_dir>/weights/v7/model.safetensors    the tensors
    <run_dir>/weights/v7/checksum             of the file above

A directory named `v7` is always whole: it is written under another name and renamed. Old versions are removed once
newer ones are served.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import RunDirError

FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """Where a Version lies."""

    version: int
    path: Path
    """The safetensors file."""
    checksum: str


def checksum(path: Path) -> str:
    """BLAKE2b-128 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class WeightStore:
    """The Versions of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def begin(self, version: int) -> Path:
        """An empty directory in which `FILE` is to be written before `seal` gives it its name. Raises `RunDirError`."""
        unfinished = self._directory / f"v{version}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._writing():
            unfinished.mkdir()
        return unfinished

    def seal(self, version: int) -> PublishedVersion:
        """Turns what was begun into a Version; one of the same number is replaced. Raises `RunDirError`."""
        unfinished, final = self._directory / f"v{version}.unfinished", self._directory / f"v{version}"
        with self._writing():
            digest = checksum(unfinished / FILE)
            (unfinished / "checksum").write_text(digest)
            if final.exists():
                shutil.rmtree(final)
            unfinished.rename(final)
        return PublishedVersion(version, final / FILE, digest)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirError(f"{self._directory} cannot be written: {error}; free space, then --resume") from error

    def kept(self, version: int) -> PublishedVersion | None:
        """A Version that an earlier process sealed; None when it is not there, or not whole."""
        final = self._directory / f"v{version}"
        try:
            digest = (final / "checksum").read_text()
            whole = checksum(final / FILE) == digest
        except OSError:
            return None
        return PublishedVersion(version, final / FILE, digest) if whole else None

    def keep_only(self, version: int) -> None:
        """Removes what a run that ended left besides `version`: older and newer Versions, and unfinished ones."""
        for path in self._directory.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def remove_before(self, version: int) -> None:
        """Removes the Versions older than `version`; call it once every engine serves that one."""
        for path in self._directory.glob("v*"):
            number = path.name[1:]
            if number.isdigit() and int(number) < version:
                shutil.rmtree(path, ignore_errors=True)
