"""A Version on disk: published in one rename, recognised by its checksum.

    <run_dir>/weights/v7/model.safetensors    the tensors
    <run_dir>/weights/v7/checksum             of the file above

A directory named `v7` is always whole: it is written under another name and renamed. Old versions are removed once
newer ones are served.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

    def publish(self, version: int, write: Callable[[Path], None]) -> PublishedVersion:
        """Has `write` put the tensors into a file and gives it its name in one step."""
        unfinished = self._directory / f"v{version}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write(unfinished / FILE)
        return self.seal(version, unfinished)

    def seal(self, version: int, unfinished: Path) -> PublishedVersion:
        """Turns a directory that holds the tensors into a Version; one of the same number is replaced."""
        digest = checksum(unfinished / FILE)
        (unfinished / "checksum").write_text(digest)
        final = self._directory / f"v{version}"
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        return PublishedVersion(version, final / FILE, digest)

    def keep_newest(self, count: int) -> None:
        """Removes all but the newest `count` Versions."""
        versions = sorted(int(path.name[1:]) for path in self._directory.glob("v*") if path.name[1:].isdigit())
        for version in versions[:-count]:
            shutil.rmtree(self._directory / f"v{version}", ignore_errors=True)
