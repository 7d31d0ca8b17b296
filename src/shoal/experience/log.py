"""The experience log: one SQLite file per run, to which rows are only added.

`schema` describes its tables. Old steps are in the `archive`, and `snapshot` shows both as one log.

SQLite runs in WAL mode with synchronous=NORMAL: a commit survives the death of any process at any moment. `sync` makes
it also survive the loss of power, and moves it out of log.sqlite-wal into the file itself. A log without the steps of
its checkpoint is refused (`LogBehind`).
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeVar

import msgspec

from shoal import wire
from shoal.errors import LogBehind, RunDirError
from shoal.experience import archive, checkpoint
from shoal.experience.schema import FORMAT, META_KEYS, SCHEMA, SIZES, TURNS, Begun, ConsumedGroup, RunMeta, StepRecord
from shoal.files import sync
from shoal.types import Group, Origin, Rollout, Task

FILE = "log.sqlite"
T = TypeVar("T")

INTERRUPTED = "interrupted"
"""The reason of groups that were in flight when their process ended."""
OPEN_TIMEOUT_S = 30.0
"""Seconds that opening a log waits for another program's lock."""
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
"""SQLite errors of a full or read-only disk."""
BODY_BYTES = 1_000_000_000
"""Bytes of one value at most, which is SQLite's limit, so that every logged value can be read again."""

CONSUMED_OF = "consumed JOIN groups USING (finished_seq) LEFT JOIN started USING (group_id)"
"""Table of the groups that were trained on, with the peers they came from."""


@dataclass(frozen=True, slots=True)
class LockedLog:
    """The one connection that writes a run's log. Invariant: while it is open, no other process has one."""

    connection: sqlite3.Connection
    lock: IO[bytes] | None
    path: Path

    def sync(self) -> None:
        """Makes all commits survive the loss of power, and the log be whole without its -wal file. Blocks.

        Readers may keep frames in the write-ahead log; these are synced here. SQLite keeps no lock on that file, so
        closing it releases none. Not while a transaction is under way.
        """
        with suppress(sqlite3.OperationalError):  # locked by a reader or writer
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        for path in (self.path.with_name(f"{FILE}-wal"), self.path.parent):
            with suppress(FileNotFoundError):
                sync(path)

    @contextmanager
    def whole(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading that also shows archived rows."""
        if archive.archived_through(self.connection) < 0:
            yield self.connection
        else:
            with snapshot(self.path.parent) as connection:
                yield connection

    def close(self) -> None:
        """Closes the file and lets others write it."""
        self.connection.close()
        if self.lock is not None:
            self.lock.close()


def locked(run_dir: Path) -> IO[bytes]:
    """Makes a run directory, which is this process's until the returned file is closed. Raises `RunDirError`."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "log.lock").open("ab")
    except OSError as error:
        raise RunDirError(f"{run_dir} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunDirError(f"{run_dir} cannot be locked; does another process write this run? ({error})") from error
    return lock


def open_log(run_dir: Path, meta: RunMeta, *, resume: bool) -> LockedLog:
    """Creates the log of a run, or opens the existing one if `resume`. Raises `RunDirError`."""
    path = run_dir / FILE
    if path.exists() and not resume:
        raise RunDirError(f"{run_dir} already holds a run; resume it with --resume or choose another run_dir")
    lock = locked(run_dir)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # other users must not read the texts
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=OPEN_TIMEOUT_S)
    except (OSError, sqlite3.Error) as error:
        lock.close()
        raise RunDirError(f"{path} cannot be opened: {error}") from error
    try:
        check_not_behind(connection, run_dir)
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        _create_or_check(connection, meta, path)
    except (sqlite3.Error, RunDirError) as error:
        connection.close()
        lock.close()
        raise error if isinstance(error, RunDirError) else unusable(path, error) from error
    return LockedLog(connection, lock, path)


def is_locked(error: Exception) -> bool:
    """True if the error is only another program's lock."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def unusable(path: Path, error: sqlite3.Error) -> RunDirError:
    """The error for a log that cannot be opened."""
    if is_locked(error):
        return RunDirError(f"{path} is locked by another program; end that one, then --resume")
    if error.sqlite_errorcode & 0xFF in _NO_ROOM:
        return RunDirError(f"{path} cannot be written: {error}; free space, then --resume")
    return RunDirError(f"{path} is not a log: {error}")


def check_not_behind(connection: sqlite3.Connection, run_dir: Path) -> None:
    """Raises `LogBehind` when a checkpoint holds steps that the log lacks."""
    saved = checkpoint.checkpoints(run_dir)
    if not saved:
        return
    there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'steps'").fetchone()
    (last,) = connection.execute("SELECT MAX(step) FROM steps").fetchone() if there else (None,)
    if last is None or last < saved[-1].step:
        raise LogBehind(
            f"{run_dir / FILE} {'has no step' if last is None else f'ends with step {last}'}, but a checkpoint holds "
            f"step {saved[-1].step}: the log has lost steps, as a copy without its -wal file does; bring back the "
            f"whole log, or remove the checkpoints after its last step to train what it lost anew"
        )


def memory_log(meta: RunMeta) -> LockedLog:
    """A log that lives and dies with the process, for simulation."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _create_or_check(connection, meta, Path(":memory:"))
    return LockedLog(connection, None, Path(":memory:"))


def _create_or_check(connection: sqlite3.Connection, meta: RunMeta, path: Path) -> None:
    """Fills a new file, or checks an old one.

    A file without the meta table was left by a process that died while creating it.
    """
    values = {"format": FORMAT} | {key: str(getattr(meta, name)) for name, key in META_KEYS.items()}
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        for statement in TURNS:
            connection.execute(statement)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
        connection.execute("COMMIT")
        return
    stored = dict(connection.execute("SELECT key, value FROM meta"))
    for key, value in values.items():
        if stored.get(key, "") != value:
            raise RunDirError(f"{path} was written with {key} = {stored.get(key)}; it cannot go on with {value}")
    for statement in TURNS if archive.has_sizes(connection) else (*TURNS, SIZES):
        connection.execute(statement)


def read_meta(connection: sqlite3.Connection) -> RunMeta:
    """The run's values at its start."""
    stored = dict(connection.execute("SELECT key, value FROM meta"))
    return msgspec.convert({name: stored.get(key, "") for name, key in META_KEYS.items()}, RunMeta, strict=False)


def log_uri(run_dir: Path) -> str:
    """SQLite URI that reads a run's log without creating files: a log without a -wal file has no writer.

    Raises `RunDirError` when there is no log.
    """
    path = (run_dir / FILE).resolve()
    if not path.exists():
        raise RunDirError(f"{run_dir} holds no run: {FILE} is missing")
    return f"{path.as_uri()}?mode=ro{'' if path.with_name(f'{FILE}-wal').exists() else '&immutable=1'}"


@contextmanager
def reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A read-only view of a log at one moment, without its archive.

    Raises `RunDirError` when the log is missing or unreadable, or a resumed run began to write it.
    """
    path, uri = run_dir / FILE, log_uri(run_dir)
    written_at = path.stat().st_mtime_ns
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30.0)) as connection:
            connection.execute("BEGIN")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                check_not_behind(connection, run_dir)
                raise RunDirError(f"{path} is empty: the run was killed while it was created")
            (written,) = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
            if written != FORMAT:
                raise RunDirError(f"{path}: expected a log of format {FORMAT}, got {written}, of another Shoal")
            yield connection
    except sqlite3.Error as error:
        raise RunDirError(f"{path} cannot be read: {error}") from error
    if uri.endswith("immutable=1") and path.stat().st_mtime_ns != written_at:
        raise RunDirError(f"{path} was written while it was read; read it again")


@contextmanager
def snapshot(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A read-only view of a run's log and archive at one moment, whether the run is running, has ended or was killed.

    Raises `RunDirError` as `reading` does, and for a damaged archive.
    """
    with reading(run_dir) as connection:
        archive.attach(connection, run_dir)
        yield connection


def read(run_dir: Path, query: Callable[[sqlite3.Connection], T]) -> T:
    """Rows of a query in a snapshot of the log. Raises `RunDirError`."""
    with snapshot(run_dir) as connection:
        return query(connection)


def insert_started(
    connection: sqlite3.Connection, group: str, service: str, at: tuple[int, int], origin: Origin | None = None
) -> None:
    """Records that a group was admitted, or came from a peer; `at` is the Version and the last step by then."""
    peer = (origin.peer_id, origin.message_id) if origin else (None, None)
    connection.execute(
        "INSERT INTO started(group_id, service, admitted_version, after_step, peer_id, message_id) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (group, service, *at, *peer),
    )


def insert_group(connection: sqlite3.Connection, group: Group, after_step: int) -> int:
    """Records a finished group and returns its finished_seq."""
    seq = connection.execute(
        "INSERT INTO groups(group_id, task, admitted_version, after_step, size) VALUES (?, ?, ?, ?, ?)",
        (group.id, wire.encode(group.task), group.admitted_version, after_step, len(group.rollouts)),
    ).lastrowid
    assert seq is not None
    bodies = [(seq, position, wire.encode(rollout)) for position, rollout in enumerate(group.rollouts)]
    connection.executemany("INSERT INTO rollouts VALUES (?, ?, ?)", bodies)
    _forget_turns(connection, [group.id])
    return seq


def insert_ended(
    connection: sqlite3.Connection,
    group_ids: Sequence[str],
    outcome: Literal["failed", "dropped"],
    reason: str,
    after_step: int,
) -> None:
    """Records that groups will never be trained on."""
    rows = [(group_id, outcome, reason, after_step) for group_id in group_ids]
    connection.executemany("INSERT INTO ended VALUES (?, ?, ?, ?)", rows)
    _forget_turns(connection, group_ids)


def _forget_turns(connection: sqlite3.Connection, group_ids: Sequence[str]) -> None:
    connection.executemany("DELETE FROM turns WHERE group_id = ?", [(group_id,) for group_id in group_ids])


def insert_step(connection: sqlite3.Connection, record: StepRecord, groups: Sequence[ConsumedGroup]) -> None:
    """Records a step together with its groups, in order. Raises `sqlite3.IntegrityError` for a group used before."""
    connection.execute("INSERT INTO steps VALUES (?, ?, ?)", (record.step, record.version, record.version_after))
    for position, group in enumerate(groups):
        usable = connection.execute(
            "INSERT INTO consumed SELECT ?1, ?2, ?3, ?4, ?5, ?6 WHERE EXISTS ("
            "SELECT 1 FROM groups LEFT JOIN ended USING (group_id) WHERE finished_seq = ?1 AND outcome IS NULL)",
            (group.finished_seq, record.step, position, group.horizon, group.trained_from, group.masked_tokens),
        ).rowcount
        if usable != 1:
            raise sqlite3.IntegrityError(f"group {group.finished_seq} of step {record.step} is missing or was dropped")


def forget_ended(connection: sqlite3.Connection) -> None:
    """Removes the rollouts of groups that were consumed, dropped or failed; SQLite uses their room again."""
    connection.execute(
        "DELETE FROM rollouts WHERE finished_seq IN (SELECT finished_seq FROM consumed UNION ALL "
        "SELECT finished_seq FROM groups JOIN ended USING (group_id))"
    )


def insert_version(connection: sqlite3.Connection, version: int, checksum: str) -> bool:
    """Records a Version's checksum; False when the log has another checksum for that Version."""
    before = connection.execute("SELECT checksum FROM published WHERE version = ?", (version,)).fetchone()
    connection.execute("INSERT INTO published VALUES (?, ?)", (version, checksum))
    return before is None or before[0] == checksum


def insert_weights(connection: sqlite3.Connection, step: int, weights: str) -> bool:
    """Records the weights after a step; False when the log has other weights of that step."""
    before = weights_of(connection, step)
    connection.execute("INSERT INTO trained VALUES (?, ?)", (step, weights))
    return before in (None, weights)


def weights_of(connection: sqlite3.Connection, step: int) -> str | None:
    """The first recorded weights after a step; None where none are."""
    row = connection.execute("SELECT weights FROM trained WHERE step = ?", (step,)).fetchone()
    return None if row is None else str(row[0])


def interrupt_in_flight(connection: sqlite3.Connection, after_step: int) -> int:
    """Ends every group that neither finished nor ended and has no finished turn, and returns their number."""
    return connection.execute(
        "INSERT INTO ended SELECT group_id, 'dropped', ?, ? FROM started WHERE group_id NOT IN "
        "(SELECT group_id FROM groups UNION ALL SELECT group_id FROM ended UNION ALL SELECT group_id FROM turns)",
        (INTERRUPTED, after_step),
    ).rowcount


def read_begun(connection: sqlite3.Connection) -> tuple[Begun, ...]:
    """Groups that neither finished nor ended, in the order of their starts."""
    rows = connection.execute(
        "SELECT group_id, body, admitted_version FROM turns JOIN started USING (group_id) WHERE rollout = -1 "
        "ORDER BY started_seq"
    )
    return tuple(Begun(group_id, wire.decode(task, Task, BODY_BYTES), at) for group_id, task, at in rows)


def read_waiting(connection: sqlite3.Connection) -> Iterator[tuple[int, Group]]:
    """Groups that finished and were neither consumed nor ended, each with its finished_seq, in that order."""
    return _groups(
        connection,
        "WHERE finished_seq NOT IN (SELECT finished_seq FROM consumed) "
        "AND group_id NOT IN (SELECT group_id FROM ended) ORDER BY finished_seq",
    )


def read_step(connection: sqlite3.Connection, step: int) -> list[Group]:
    """The groups of a step, in training order."""
    consumed = "JOIN consumed USING (finished_seq) WHERE step = ? ORDER BY position"
    return [group for _, group in _groups(connection, consumed, step)]


def newest_groups(connection: sqlite3.Connection, own: int, external: int) -> Iterator[Group]:
    """So many of the newest own groups, and of those of peers that were trained on, oldest first."""
    newest = (
        "finished_seq IN (SELECT finished_seq FROM groups JOIN started USING (group_id) WHERE peer_id IS {} "
        "ORDER BY finished_seq DESC LIMIT ?{})"
    )
    which = f"WHERE {newest.format('NULL', 1)} OR {newest.format('NOT NULL', 2)} ORDER BY finished_seq"
    return (group for _, group in _groups(connection, which, own, external))


def usable_groups(connection: sqlite3.Connection, service: str, newest: int) -> Iterator[Group]:
    """The newest own groups of a task that had enough to train on, trained or not, oldest first."""
    usable = (
        "SELECT finished_seq FROM groups JOIN started USING (group_id) LEFT JOIN ended USING (group_id) "
        "WHERE service = ? AND peer_id IS NULL AND outcome IS NOT 'failed' ORDER BY finished_seq DESC LIMIT ?"
    )
    found = _groups(connection, f"WHERE finished_seq IN ({usable}) ORDER BY finished_seq", service, newest)
    return (group for _, group in found)


def _groups(connection: sqlite3.Connection, which: str, *values: int | str) -> Iterator[tuple[int, Group]]:
    """Finished groups with their finished_seq."""
    rows = connection.execute(
        "SELECT finished_seq, group_id, task, groups.admitted_version, peer_id, message_id "
        f"FROM groups LEFT JOIN started USING (group_id) {which}",
        values,
    )
    bodies = "SELECT body FROM rollouts WHERE finished_seq = ? ORDER BY position"
    for seq, group_id, task, version, *of in rows:
        rollouts = tuple(wire.decode(body, Rollout, BODY_BYTES) for (body,) in connection.execute(bodies, (seq,)))
        origin = None if of[0] is None else Origin(*of)
        yield seq, Group(group_id, wire.decode(task, Task, BODY_BYTES), rollouts, version, origin)


def count_used(connection: sqlite3.Connection) -> int:
    """Number of trained groups without those of peers, which pass no gate."""
    (used,) = connection.execute(f"SELECT COUNT(*) FROM {CONSUMED_OF} WHERE peer_id IS NULL").fetchone()
    return int(used)


def read_steps(connection: sqlite3.Connection, after: int = -1) -> list[StepRecord]:
    """The steps after `step`, in order."""
    rows = connection.execute("SELECT step, version, version_after FROM steps WHERE step > ? ORDER BY step", (after,))
    return [StepRecord(*row) for row in rows]
