"""Store of Versions on disk: each appears by an atomic rename and is recognised by its checksum.

    <run_dir>/weights/v7/model.safetensors    the tensors, or adapter_model.safetensors with adapter_config.json
    <run_dir>/weights/v7/checksum             of the file above

A directory named `v7` is always whole: it is written under another name and renamed. Old Versions are removed once
engines serve newer ones.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import RunDirError
from shoal.files import ADAPTER_FILE, MODEL_FILE, checksum, has_checksum
from shoal.weights.manifest import KNOWN


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """Location of a Version."""

    version: int
    path: Path
    """Path of the safetensors file."""
    checksum: str


class WeightStore:
    """Versions of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def begin(self, version: int) -> Path:
        """Creates an empty directory; the caller writes `MODEL_FILE` or `ADAPTER_FILE` in it before `seal` renames it.

        Raises `RunDirError`.
        """
        unfinished = self.unfinished(version)
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._writing():
            unfinished.mkdir()
        return unfinished

    def unfinished(self, version: int) -> Path:
        """Folder that `begin` makes."""
        return self._directory / f"v{version}.unfinished"

    def directory_of(self, version: int) -> Path:
        """Folder of a sealed Version."""
        return self._directory / f"v{version}"

    def seal(self, version: int) -> WrittenVersion:
        """Renames a begun directory to its Version, replacing an older one. Raises `RunDirError`."""
        unfinished, final = self.unfinished(version), self.directory_of(version)
        with self._writing():
            name = _name_in(unfinished)
            digest = checksum(unfinished / name, KNOWN(unfinished / name))
            (unfinished / "checksum").write_text(digest)
            if final.exists():
                shutil.rmtree(final)
            unfinished.rename(final)
        return WrittenVersion(version, final / name, digest)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirError(f"{self._directory} cannot be written: {error}; free space, then --resume") from error

    def kept(self, version: int) -> WrittenVersion | None:
        """Version that an earlier process sealed; None when it is absent or incomplete."""
        final = self._directory / f"v{version}"
        try:
            digest = (final / "checksum").read_text()
            file = final / _name_in(final)
            whole = has_checksum(file, digest)
        except OSError:
            return None
        return WrittenVersion(version, file, digest) if whole else None

    def keep_only(self, version: int) -> None:
        """Removes all other Versions that an ended run left, older, newer or unfinished."""
        for path in self._directory.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def remove_before(self, version: int) -> None:
        """Removes the Versions older than `version`; call it once every engine serves `version`."""
        for path in self._directory.glob("v*"):
            number = path.name[1:]
            if number.isdigit() and int(number) < version:
                shutil.rmtree(path, ignore_errors=True)


def _name_in(directory: Path) -> str:
    """Name of the file with a Version's tensors: a whole model's folder may have its adapter too."""
    return (
        ADAPTER_FILE if (directory / ADAPTER_FILE).is_file() and not (directory / MODEL_FILE).is_file() else MODEL_FILE
    )
