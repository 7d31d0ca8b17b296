"""Copies of a running run to another disk, from which it goes on when its host is lost.

    <backup>/log.sqlite, archive/, checkpoints/, metrics.jsonl, resolved.toml, credentials.json, run.key, run.token

SQLite's backup interface gives the log as of one moment while the run goes on writing it. The snapshot is made beside
the log and copied as a file, because SQLite's locks do not hold on network file systems. Each file gets its name once
it is whole. Checkpoints come before the log, which therefore has every step that a checkpoint of the backup holds. A
backup lies in a folder, or behind a URL whose protocol fsspec knows.
"""

import asyncio
import posixpath
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from shoal.errors import RunDirError
from shoal.files import replaced
from shoal.net.identity import Identity
from shoal.observe.metrics import Trackers

LOG = "log.sqlite"
KEY_FILE = "run.key"
METRICS = "metrics.jsonl"
FIRST_FILES = (KEY_FILE, "run.token", "resolved.toml", "credentials.json")
"""Files that are copied before all others, because they say whose a backup is."""
FOLDERS = ("checkpoints", "archive")


class BackupPlace(Protocol):
    """Place of a backup, whose files have names with slashes. Every method raises `OSError`."""

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def names(self, folder: str = "") -> set[str]:
        """Names in a folder; of none when there is no such folder."""

    def put(self, source: Path, name: str) -> None:
        """Copies a file there; it has its name once it is whole."""

    def get(self, name: str, target: Path) -> None:
        """Copies a file from there."""

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it."""


class FolderPlace:
    """Folder on another disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def names(self, folder: str = "") -> set[str]:
        return {path.name for path in (self._folder / folder).glob("*")}

    def put(self, source: Path, name: str) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as unfinished:
            shutil.copy2(source, unfinished)

    def get(self, name: str, target: Path) -> None:
        shutil.copy2(self._folder / name, target)

    def remove(self, name: str) -> None:
        path = self._folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class UrlPlace:
    """Place behind a URL, such as `s3://bucket/run`; credentials are those that its package finds."""

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        with _as_os_error(url):
            self._fs, self._root = fsspec.url_to_fs(url)

    def has(self, name: str) -> bool:
        with _as_os_error(name):
            return bool(self._fs.exists(self._at(name)))

    def names(self, folder: str = "") -> set[str]:
        with _as_os_error(folder):
            where = self._at(folder)
            found = self._fs.ls(where, detail=False) if self._fs.exists(where) else []
            return {posixpath.basename(path.rstrip("/")) for path in found}

    def put(self, source: Path, name: str) -> None:
        with _as_os_error(name):
            target = self._at(name)
            self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self._fs.put_file(str(source), f"{target}.unfinished")
            self._fs.mv(f"{target}.unfinished", target)

    def get(self, name: str, target: Path) -> None:
        with _as_os_error(name):
            self._fs.get_file(self._at(name), str(target))

    def remove(self, name: str) -> None:
        with _as_os_error(name):
            self._fs.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name)


@contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """Raises what goes wrong as `OSError`: each protocol has errors of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {error}") from error


def place_of(where: str) -> BackupPlace:
    """Place of `checkpoint.backup`. Raises `OSError`."""
    return UrlPlace(where) if "://" in where else FolderPlace(Path(where))


async def keep_backup(run_dir: Path, target: str, every_s: float, trackers: Trackers) -> None:
    """Copies the run again and again, for ever; a copy that fails is an event, and the run goes on."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await asyncio.to_thread(back_up, run_dir, target)
        except (OSError, sqlite3.Error) as error:
            trackers.log_event("backup_failed", reason=f"{target}: {error}")


def check_backup(run_dir: Path, target: str) -> None:
    """Raises `RunDirError` for a place that cannot be had, or that has the backup of another run."""
    key, kept = Identity.load(run_dir / KEY_FILE).public_key, b""
    try:
        place = place_of(target)
        filled = place.names()
        if KEY_FILE in filled:
            with tempfile.TemporaryDirectory() as folder:
                place.get(KEY_FILE, Path(folder) / KEY_FILE)
                (Path(folder) / KEY_FILE).chmod(0o600)
                kept = Identity.load(Path(folder) / KEY_FILE).public_key
    except OSError as error:
        why = error.strerror or error
        raise RunDirError(f"checkpoint.backup: expected a folder or a URL, got {target}: {why}") from error
    if filled and kept != key:
        raise RunDirError(f"checkpoint.backup: expected an empty folder or this run's, got something else in {target}")


def back_up(run_dir: Path, target: str) -> None:
    """Brings a backup up to date. Raises `OSError` or `sqlite3.Error`."""
    place = place_of(target)
    for name in FIRST_FILES:
        if (run_dir / name).exists():
            place.put(run_dir / name, name)
    for name in FOLDERS:
        _mirror(run_dir, name, place)
    snapshot = run_dir / "backup.sqlite"
    snapshot.unlink(missing_ok=True)
    with closing(sqlite3.connect(run_dir / LOG)) as log, closing(sqlite3.connect(snapshot)) as copy:
        log.backup(copy)
    place.put(snapshot, LOG)
    snapshot.unlink()
    if (run_dir / METRICS).exists():
        place.put(run_dir / METRICS, METRICS)


def _mirror(run_dir: Path, folder: str, place: BackupPlace) -> None:
    """Copies what is new below a folder, and then removes what is gone; finished files never change."""
    for path in sorted((run_dir / folder).rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if path.is_file() and _finished(path) and not place.has(name):
            place.put(path, name)
    for gone in place.names(folder):
        if not (run_dir / folder / gone).exists():
            place.remove(f"{folder}/{gone}")


def _finished(path: Path) -> bool:
    return not any(part.endswith((".unfinished", ".replaced")) for part in path.parts)
