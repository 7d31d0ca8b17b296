"""Copies of a running run on another disk, to continue it when its host is lost.

    <backup>/backup.json       names, modes and checksums of the run's files; replaced last
    <backup>/objects/<hash>    their bytes, named by their checksum

A copy begins with a stage in the run directory: hard links to checkpoints, then SQLite's snapshot of the log, then
links to the shards that the snapshot names. So the log has every step of each checkpoint, and no shard
disappears during the copy. New objects follow, then `backup.json`; objects that it no longer
names are removed. An interrupted copy leaves the previous one whole. A backup is a folder, or a
URL of a protocol of fsspec.
"""

import asyncio
import posixpath
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import msgspec

from shoal.errors import ConfigError, RunDirError
from shoal.experience import archive, checkpoint, held_out
from shoal.files import checksum, has_checksum, replaced
from shoal.net.identity import Identity
from shoal.observe.metrics import Trackers

LOG = "log.sqlite"
KEY_FILE = "run.key"
SWARM_FILES = tuple(f"swarm/{name}" for name in ("identity.pem", "session", "banned.txt", "known.txt"))
PLAIN_FILES = (KEY_FILE, "run.token", *SWARM_FILES, "resolved.toml", "credentials.json", "metrics.jsonl")
"""Files that are copied as they are. The metrics come before the log, so that they never have more steps than it."""
MANIFEST, OBJECTS = "backup.json", "objects"
MOST_MANIFEST_BYTES = 64_000_000
EVERY_S, REST = 5.0, 20.0
"""Least seconds between two copies, and multiple of the seconds of the last one."""
STAGES = 10
"""Attempts to stage a run whose checkpoints change while they are linked."""
_copying = threading.Lock()
"""Held by the copy that runs: the last copy of a run may begin before a cancelled one has ended."""


class BackupFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the run."""

    name: str
    """Path below the run directory, with slashes."""
    checksum: str
    mode: int


class BackupManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `backup.json`."""

    key: str
    """Public key of the run, in hex: it identifies the owner of the backup."""
    files: tuple[BackupFile, ...] = ()


class BackupPlace:
    """A folder on another disk, or a URL such as `s3://bucket/run`, whose package finds the credentials.

    Files have names with slashes. Every method raises `OSError`.
    """

    def __init__(self, where: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        with _as_os_error(where):
            self._fs, self._root = fsspec.url_to_fs(where)

    def names(self, folder: str = "") -> set[str]:
        """Names in a folder; empty if it does not exist."""
        with _as_os_error(folder):
            where = self._at(folder)
            self._fs.invalidate_cache(where)  # another host may have written there
            found = self._fs.ls(where, detail=False) if self._fs.exists(where) else []
            return {posixpath.basename(path.rstrip("/")) for path in found}

    def put(self, source: Path, name: str) -> None:
        """Copies a file there; it has its name once it is whole. In a folder only its owner can read it."""
        with _as_os_error(name):
            target = self._at(name)
            self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
            if "file" in self._fs.protocol:  # the run's key, its token and its texts are among the copies
                with replaced(Path(target), private=True) as unfinished:
                    shutil.copyfile(source, unfinished)
                return
            self._fs.put_file(str(source), f"{target}.unfinished")
            self._fs.mv(f"{target}.unfinished", target)

    def get(self, name: str, target: Path) -> None:
        """Copies a file from there."""
        with _as_os_error(name):
            self._fs.get_file(self._at(name), str(target))

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it."""
        with _as_os_error(name):
            self._fs.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name)


@contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """Converts the errors of all protocols to `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {error}") from error


async def keep_backup(run_dir: Path, target: str, trackers: Trackers) -> None:
    """Copies the run at intervals; a failed copy is an event, and the run continues.

    Rests `REST` times as long as a copy took, so that copying takes little of the disk and the link.
    """
    took_s = 0.0
    while True:
        await asyncio.sleep(max(EVERY_S, REST * took_s))
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(back_up, run_dir, target)
        except (OSError, sqlite3.Error) as error:
            trackers.log_event("backup_failed", reason=f"{target}: {error}")
        took_s = time.monotonic() - began_s


def check_backup(run_dir: Path, target: str) -> None:
    """Raises `RunDirError` for an inaccessible place, or one with anything but this run's backup.

    Marks an empty place as this run's.
    """
    key = _public_key(run_dir)
    try:
        place = BackupPlace(target)
        found = manifest_of(place)
        if found is None and not place.names():
            _put_manifest(run_dir, place, BackupManifest(key))
            return
    except OSError as error:
        why = error.strerror or error
        raise RunDirError(f"checkpoint.backup: expected a folder or a URL, got {target}: {why}") from error
    if found is None or found.key != key:
        raise RunDirError(f"checkpoint.backup: expected an empty folder or this run's, got something else in {target}")


def leave_backup(run_dir: Path, target: str) -> None:
    """Takes this run's mark from a place to which nothing was copied yet; an inaccessible place keeps it."""
    with suppress(OSError, ConfigError):
        place = BackupPlace(target)
        if manifest_of(place) == BackupManifest(_public_key(run_dir)):
            place.remove(MANIFEST)


def back_up(run_dir: Path, target: str) -> None:
    """Brings a backup up to date. Raises `OSError` or `sqlite3.Error`, and leaves the backup as it was."""
    copy_run(run_dir, BackupPlace(target))


def copy_run(run_dir: Path, place: BackupPlace) -> None:
    """Copies a run to a place, as `back_up` does."""
    stage = run_dir / "backup.unfinished"
    with _copying:
        try:
            _stage(run_dir, stage)
            paths = sorted(path for path in stage.rglob("*") if path.is_file())
            described = {path: _described(path, stage) for path in paths}
            there = place.names(OBJECTS)
            for path, file in described.items():
                if file.checksum not in there:
                    place.put(path, f"{OBJECTS}/{file.checksum}")
            _put_manifest(run_dir, place, BackupManifest(_public_key(run_dir), tuple(described.values())))
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        for gone in there - {file.checksum for file in described.values()}:
            place.remove(f"{OBJECTS}/{gone}")


def restore(source: str, run_dir: Path) -> None:
    """Makes a run directory from a backup, for `--resume`. Raises `RunDirError` and then leaves nothing."""
    if run_dir.exists():
        raise RunDirError(f"restore: expected a new folder, got {run_dir}, which exists")
    unfinished = run_dir.with_name(f"{run_dir.name}.unfinished")
    try:
        place = BackupPlace(source)
        found = manifest_of(place)
        while found is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                _fetch(place, found, unfinished)
                break
            except OSError:
                before, found = found, manifest_of(place)
                if found == before:  # else the run has replaced the copy meanwhile
                    raise
        if found is None or not found.files:
            raise RunDirError(f"restore: expected a backup with a finished copy, got {source}")
        unfinished.replace(run_dir)
    except OSError as error:
        raise RunDirError(f"restore: {source} cannot be copied to {run_dir}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def manifest_of(place: BackupPlace) -> BackupManifest | None:
    """Manifest of a backup, or None. Raises `OSError`, also for an unreadable one."""
    if MANIFEST not in place.names():
        return None
    with tempfile.TemporaryDirectory() as folder:
        place.get(MANIFEST, Path(folder) / MANIFEST)
        if (Path(folder) / MANIFEST).stat().st_size > MOST_MANIFEST_BYTES:
            raise OSError(f"{MANIFEST}: expected at most {MOST_MANIFEST_BYTES} bytes")
        try:
            return msgspec.json.decode((Path(folder) / MANIFEST).read_bytes(), type=BackupManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise OSError(f"{MANIFEST} is damaged: {error}") from error


def _put_manifest(run_dir: Path, place: BackupPlace, manifest: BackupManifest) -> None:
    """Makes a manifest the backup's."""
    with tempfile.TemporaryDirectory(dir=run_dir, prefix="backup.") as folder:
        (Path(folder) / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        place.put(Path(folder) / MANIFEST, MANIFEST)


def _public_key(run_dir: Path) -> str:
    return Identity.load(run_dir / KEY_FILE).public_key.hex()


def _stage(run_dir: Path, stage: Path) -> None:
    """Puts the run's files of one moment into an empty folder. Raises `OSError` or `sqlite3.Error`."""
    for _ in range(STAGES):
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(mode=0o700)
        (stage / "swarm").mkdir()
        for name in PLAIN_FILES:
            with suppress(FileNotFoundError):
                shutil.copy2(run_dir / name, stage / name)
        for answers in held_out.answer_files(run_dir):
            _link(answers, stage / answers.relative_to(run_dir))
        for saved in checkpoint.checkpoints(run_dir):
            _link_checkpoint(saved.path, stage / saved.path.relative_to(run_dir))
        with closing(sqlite3.connect(run_dir / LOG)) as log, closing(sqlite3.connect(stage / LOG)) as copy:
            log.backup(copy)
            shards = [name for (name,) in copy.execute("SELECT name FROM shards")]
            archived = archive.archived_through(copy)
        (stage / LOG).chmod((run_dir / LOG).stat().st_mode & 0o777)
        for name in shards:
            _link(run_dir / archive.FOLDER / name, stage / archive.FOLDER / name)
        staged = checkpoint.checkpoints(stage)
        if staged[-1].step >= archived if staged else not checkpoint.checkpoints(run_dir):
            return
    raise OSError("checkpoints are replaced faster than they can be linked; save them less often")


def _link_checkpoint(path: Path, target: Path) -> None:
    """Links the files of a checkpoint, or nothing when the run removes or replaces it meanwhile."""
    try:
        listed = (path / checkpoint.FILES).read_bytes()
        for file in [file for file in path.rglob("*") if file.is_file()]:
            _link(file, target / file.relative_to(path))
        if (path / checkpoint.FILES).read_bytes() == listed:
            return
    except FileNotFoundError:
        pass
    shutil.rmtree(target, ignore_errors=True)


def _link(path: Path, target: Path) -> None:
    """Gives finished bytes a second name; a disk without hard links gets a copy. Raises `FileNotFoundError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(path)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(path, target)


def _described(path: Path, stage: Path) -> BackupFile:
    status = path.stat()
    digest = _checksum_of(path, status.st_ino, status.st_size, status.st_mtime_ns)
    return BackupFile(path.relative_to(stage).as_posix(), digest, status.st_mode & 0o777)


@lru_cache(maxsize=10_000)
def _checksum_of(path: Path, inode: int, size: int, mtime_ns: int) -> str:
    """Checksum of a staged file, read once for the links of all copies to the same bytes."""
    return checksum(path)


def _fetch(place: BackupPlace, manifest: BackupManifest, folder: Path) -> None:
    """Copies the files of a manifest into a new folder. Raises `OSError`, also for bytes that differ."""
    folder.mkdir(mode=0o700, parents=True)
    for file in manifest.files:
        target = folder / file.name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise OSError(f"{MANIFEST}: expected names below the run directory, got {file.name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        place.get(f"{OBJECTS}/{file.checksum}", target)
        if not has_checksum(target, file.checksum):
            raise OSError(f"{OBJECTS}/{file.checksum} of {file.name} is damaged")
        target.chmod(file.mode)
