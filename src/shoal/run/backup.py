"""Copies of a running run to another disk, from which it goes on when its host is lost.

    <backup>/log.sqlite, archive/, checkpoints/, metrics.jsonl, resolved.toml, credentials.json, run.key, run.token

SQLite's backup interface gives the log as of one moment while the run goes on writing it. The snapshot is made beside
the log and copied as a file, because SQLite's locks do not hold on network file systems. Each file gets its name once
it is whole. Checkpoints come before the log, which therefore has every step that a checkpoint of the backup holds.
"""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from shoal.errors import RunDirError
from shoal.files import replaced
from shoal.net.identity import Identity
from shoal.observe.metrics import Trackers

LOG = "log.sqlite"
KEY_FILE = "run.key"
FILES = ("metrics.jsonl", "resolved.toml", "credentials.json", KEY_FILE, "run.token")
FOLDERS = ("checkpoints", "archive")


async def keep_backup(run_dir: Path, target: Path, every_s: float, trackers: Trackers) -> None:
    """Copies the run again and again, for ever; a copy that fails is an event, and the run goes on."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await asyncio.to_thread(back_up, run_dir, target)
        except (OSError, sqlite3.Error) as error:
            trackers.log_event("backup_failed", reason=f"{target}: {error}")


def check_backup(run_dir: Path, target: Path) -> None:
    """Raises `RunDirError` for a folder that cannot be made, or that has the backup of another run."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        filled = any(target.iterdir())
    except OSError as error:
        raise RunDirError(f"checkpoint.backup: expected a folder, got {target}: {error.strerror}") from error
    key = Identity.load(run_dir / KEY_FILE).public_key
    if filled and ((target / KEY_FILE).is_file() and Identity.load(target / KEY_FILE).public_key) != key:
        raise RunDirError(f"checkpoint.backup: expected an empty folder or this run's, got something else in {target}")


def back_up(run_dir: Path, target: Path) -> None:
    """Brings a backup up to date. Raises `OSError` or `sqlite3.Error`."""
    for name in FOLDERS:
        _mirror(run_dir / name, target / name)
    snapshot = run_dir / "backup.sqlite"
    snapshot.unlink(missing_ok=True)
    with closing(sqlite3.connect(run_dir / LOG)) as log, closing(sqlite3.connect(snapshot)) as copy:
        log.backup(copy)
    _copy(snapshot, target / LOG)
    snapshot.unlink()
    for name in FILES:
        if (run_dir / name).exists():
            _copy(run_dir / name, target / name)


def _mirror(source: Path, target: Path) -> None:
    """Copies what is new below a folder, and then removes what is gone; finished files never change."""
    present = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and _finished(path)}
    for path in sorted(present):
        if not (target / path).exists():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            _copy(source / path, target / path)
    for path in target.glob("*"):
        if not (source / path.name).exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _finished(path: Path) -> bool:
    return not any(part.endswith((".unfinished", ".replaced")) for part in path.parts)


def _copy(source: Path, target: Path) -> None:
    with replaced(target) as unfinished:
        shutil.copy2(source, unfinished)
