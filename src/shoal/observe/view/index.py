"""The viewer's index of a run's rollouts: finds any of a million without reading all bodies.

A thread reads the log a few groups at a time, newest first, then its archive, then new groups. Each read is a short
snapshot, so that it never blocks the run's writer. The index is a temporary file; bodies stay in the log and are looked
up by number. Steps are numbered as in metrics.jsonl, from 1. A log without a -wal file has no writer and is opened so
that SQLite creates no files in the run directory.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shoal import wire
from shoal.errors import RunDirError, ShoalError, WireError
from shoal.experience import archive
from shoal.experience.log import BODY_BYTES, FILE, log_uri, reading
from shoal.experience.raw import RawGroup
from shoal.experience.schema import SCHEMA
from shoal.types import RewardStatus, Task

GROUPS_AT_ONCE = 64
POLL_S = 1.0
PER_PAGE = 50
TEXT_SEARCH_S = 5.0
"""Longest search for a text in bodies; then the page shows the hits so far."""
UNREADABLE = "unreadable"
T = TypeVar("T")
_SCHEMA = """
CREATE TABLE rollouts(seq INTEGER, position INTEGER, task TEXT, status TEXT, reason TEXT, reward REAL, tokens INTEGER,
    version INTEGER, step INTEGER, PRIMARY KEY(seq, position));
CREATE INDEX rollouts_by_step ON rollouts(step, reward);
CREATE INDEX rollouts_by_reward ON rollouts(reward, seq DESC);
CREATE TABLE groups(seq INTEGER PRIMARY KEY, id TEXT, admitted INTEGER, step INTEGER, version INTEGER, dropped TEXT,
    peer TEXT);
CREATE INDEX groups_by_id ON groups(id);
"""
_NEW = """SELECT finished_seq, group_id, task, groups.admitted_version, step + 1, steps.version, reason, peer_id
FROM groups LEFT JOIN started USING (group_id)
LEFT JOIN consumed USING (finished_seq) LEFT JOIN steps USING (step) LEFT JOIN ended USING (group_id)"""
_BODIES = "SELECT position, body FROM rollouts WHERE finished_seq = ?"
_BODY = """COALESCE((SELECT body FROM log.rollouts WHERE finished_seq = seq AND log.rollouts.position = found.position),
moved_value(seq, found.position), x'')"""
_TASK = "COALESCE((SELECT task FROM log.groups WHERE finished_seq = seq), moved_value(seq, NULL), x'')"
_ROW = f"""SELECT seq, position, task, status, COALESCE(NULLIF(reason, ''), (SELECT dropped FROM groups WHERE
groups.seq = found.seq), ''), reward, tokens, found.version, step, {_BODY}, {_TASK}
FROM rollouts AS found WHERE seq = ? AND found.position = ?"""
_ORDERS = {
    "newest": "seq DESC, position DESC",
    "worst": "reward, seq DESC",
    "best": "reward DESC, seq DESC",
    "longest": "tokens DESC, seq DESC",
}


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query: which rollouts, in which order; None or empty fields do not filter."""

    run: str = ""
    task: str = ""
    status: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    step: int | None = None
    version: int | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None
    text: str = ""
    sort: Literal["newest", "worst", "best", "longest"] = "newest"
    page: int = 1

    def where(self) -> tuple[list[str], list[object]]:
        """The conditions in SQL, and their values; the text's is last."""
        asked = {
            "task = ?": self.task or None,
            "status = ?": None if self.status in ("", "unscored") else self.status,
            "reward >= ?": self.reward_from,
            "reward <= ?": self.reward_to,
            "tokens >= ?": self.tokens_from,
            "tokens <= ?": self.tokens_to,
            "step = ?": self.step,
            "found.version = ?": self.version,
            f"instr({_BODY}, ?)": self.text.encode() or None,
        }
        given = {sql: value for sql, value in asked.items() if value is not None}
        unscored = ["reward IS NULL"] if self.status == "unscored" else []
        scored = ["reward IS NOT NULL"] if self.sort in ("worst", "best") else []
        return [*unscored, *scored, *given], list(given.values())


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout of a list."""

    seq: int
    position: int
    task: str
    status: str
    reason: str
    reward: float | None
    tokens: int
    version: int | None
    step: int | None
    body: bytes
    asked: bytes
    """Task of its group, encoded."""


@dataclass(frozen=True, slots=True)
class Found:
    """One page of a list."""

    rows: list[Row]
    total: int | None
    """None for a search by text, which does not count all hits."""
    more: bool
    gave_up: bool
    """Whether the search for a text ran out of time."""


class RolloutIndex:
    """The table of one run. `close` ends its thread."""

    def __init__(self, run_dir: Path, file: Path) -> None:
        self.problem = ""
        """Why the log cannot be read; empty when it can."""
        self.complete = False
        """Whether the thread has read the whole log once."""
        self.broken: set[str] = set()
        """Why files of the archive cannot be read: their rollouts are missing, or have no texts."""
        self._run_dir, self._file = run_dir, file
        self._low = self._high = self._step = -1
        self._shards: set[str] = set()
        self._spans = cache(lambda file: self._unless_broken(archive.spans, file) or [])
        self._stop = threading.Event()
        with closing(sqlite3.connect(file)) as index:
            index.executescript(f"PRAGMA journal_mode=WAL; {_SCHEMA}")
        self._thread = threading.Thread(target=self._follow, name=f"index of {run_dir.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def search(self, wanted: Filter) -> Found:
        """A page of the rollouts that match. Raises `RunDirError`."""
        conditions, values = wanted.where()
        matching = f"FROM rollouts AS found {'WHERE ' if conditions else ''}{' AND '.join(conditions)}"
        keys: list[tuple[int, int]] = []
        gave_up, total = False, None
        with self._reading() as connection:
            if wanted.text:
                deadline = time.monotonic() + TEXT_SEARCH_S
                connection.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
            else:
                (total,) = connection.execute(f"SELECT COUNT(*) {matching}", values).fetchone()
            try:
                limits = [PER_PAGE + 1, (max(1, wanted.page) - 1) * PER_PAGE]
                query = f"SELECT seq, position {matching} ORDER BY {_ORDERS[wanted.sort]} LIMIT ? OFFSET ?"
                for key in connection.execute(query, [*values, *limits]):
                    keys.append(key)  # those found until the search is given up count
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                    raise
                gave_up = True
            connection.set_progress_handler(None, 0)
            rows = [Row(*connection.execute(_ROW, key).fetchone()) for key in keys[:PER_PAGE]]
        return Found(rows, total, len(keys) > PER_PAGE, gave_up)

    def group(self, seq: int) -> RawGroup:
        """One group. Raises `RunDirError` when it is not there."""
        with self._reading() as connection:
            row = connection.execute(
                f"SELECT seq, id, {_TASK}, admitted, peer, dropped, step - 1, version, NULL, NULL, NULL FROM groups "
                "WHERE seq = ?",
                (seq,),
            ).fetchone()
            if row is None:
                raise RunDirError(f"group {seq} is not in the log, or was not read yet")
            bodies = f"SELECT {_BODY} FROM rollouts AS found WHERE seq = ? ORDER BY position"
            return RawGroup(*(*row, tuple(body for (body,) in connection.execute(bodies, (seq,)))))

    def tasks(self) -> list[str]:
        """Names of the tasks that have rollouts."""
        return [name for (name,) in self._all("SELECT DISTINCT task FROM rollouts ORDER BY 1")]

    def lacks(self, step: int | None) -> bool:
        """Whether rollouts of a step, or of any step, may be written but not indexed yet."""
        return not self.complete or (step or 0) > (self._all("SELECT MAX(step) FROM rollouts")[0][0] or 0)

    def count(self) -> int:
        """How many rollouts were read so far."""
        return int(self._all("SELECT COUNT(*) FROM rollouts")[0][0])

    def _all(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self._file)) as connection:
            return connection.execute(query).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to the table with the log attached. Raises `RunDirError`."""
        try:
            with closing(sqlite3.connect(self._file, uri=True, isolation_level=None)) as connection:
                connection.execute("ATTACH ? AS log", (log_uri(self._run_dir),))
                connection.execute("BEGIN")  # one snapshot of the log and its list of shards
                names = connection.execute("SELECT name FROM log.shards").fetchall()
                files = [self._run_dir / archive.FOLDER / name for (name,) in names]
                moved = archive.moved_value(files, self._spans)
                connection.create_function("moved_value", 2, partial(self._unless_broken, moved))
                yield connection
        except sqlite3.Error as error:
            raise RunDirError(f"{self._run_dir / FILE} cannot be read: {error}") from error

    def _unless_broken(self, read: Callable[..., T], *of: object) -> T | None:
        """Reads something of the archive; None when its file is damaged."""
        try:
            return read(*of)
        except RunDirError as error:
            self.broken.add(str(error))
            return None

    def _follow(self) -> None:
        with closing(sqlite3.connect(self._file, isolation_level=None)) as index:
            index.execute("PRAGMA synchronous=OFF")
            while not self._stop.is_set():
                try:
                    more = (self._run_dir / FILE).exists() and self._catch_up(index)
                    self.problem = ""
                except (sqlite3.Error, ShoalError, OSError) as error:
                    index.rollback()
                    self.problem, more = str(error), False
                if not more:
                    self.complete = not self.problem
                    self._stop.wait(POLL_S)

    def _catch_up(self, index: sqlite3.Connection) -> bool:
        """Indexes the next few groups; returns False if there were none."""
        with reading(self._run_dir) as log:
            high, low = self._high, self._low
            if high < 0:
                high = low = log.execute("SELECT COALESCE(MAX(finished_seq), 0) FROM groups").fetchone()[0]
            newest = log.execute("SELECT COALESCE(MAX(step), -1) FROM steps").fetchone()[0]
            index.execute("BEGIN")
            self._settle(index, log)
            order = "WHERE finished_seq > ? ORDER BY finished_seq"
            groups = log.execute(f"{_NEW} {order} LIMIT ?", (high, GROUPS_AT_ONCE)).fetchall()
            if groups:
                high = groups[-1][0]
            else:
                order = "WHERE finished_seq <= ? ORDER BY finished_seq DESC"
                groups = log.execute(f"{_NEW} {order} LIMIT ?", (low, GROUPS_AT_ONCE)).fetchall()
                low = groups[-1][0] - 1 if groups else 0
            self._insert(index, log, groups)
            index.execute("COMMIT")
            self._step, self._high, self._low = newest, high, low
            names = [name for (name,) in log.execute("SELECT name FROM shards ORDER BY through DESC")]
        new = [name for name in names if name not in self._shards]
        if not groups and new:
            try:
                self._read_shard(index, self._run_dir / archive.FOLDER / new[0])
            except (RunDirError, sqlite3.OperationalError) as error:
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
                    raise  # of the index itself, such as a full disk, not of `moved_value`, which gets no code
                index.rollback()
                self.broken.add(f"{new[0]}: {error}")
            self._shards.add(new[0])
        return bool(groups or new)

    def _settle(self, index: sqlite3.Connection, log: sqlite3.Connection) -> None:
        """Updates indexed groups with the step that consumed them or the reason why they were dropped."""
        consumed = log.execute(
            "SELECT step + 1, version, finished_seq FROM consumed JOIN steps USING (step) WHERE step > ?", (self._step,)
        ).fetchall()
        index.executemany("UPDATE groups SET step = ?, version = ? WHERE seq = ?", consumed)
        steps = ((step, seq) for step, _, seq in consumed)
        index.executemany("UPDATE rollouts SET step = ? WHERE seq = ?", steps)
        ended = log.execute("SELECT reason, group_id FROM ended WHERE after_step >= ?", (self._step,))
        index.executemany("UPDATE groups SET dropped = ? WHERE id = ?", ended)

    def _read_shard(self, index: sqlite3.Connection, file: Path) -> None:
        """Inserts the rows of an archive file, replacing those read from the log."""
        with closing(sqlite3.connect(":memory:")) as log:
            log.executescript(SCHEMA)
            archive.attach_files(log, [file])
            index.execute("BEGIN")
            self._insert(index, log, log.execute(f"{_NEW} ORDER BY finished_seq DESC"))
            index.execute("COMMIT")

    def _insert(self, index: sqlite3.Connection, log: sqlite3.Connection, groups: Iterable[Any]) -> None:
        """Puts groups of the log, or of a shard, into the table with their rollouts."""
        for seq, group_id, encoded, admitted, step, version, dropped, peer in groups:
            if self._stop.is_set():
                break
            task = UNREADABLE
            with suppress(WireError):
                task = wire.decode(encoded, Task, BODY_BYTES).service
            rows = [(seq, at, task, *_figures(body), step) for at, body in log.execute(_BODIES, (seq,))]
            index.executemany("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            row = (seq, group_id, admitted, step, version, dropped, peer)
            index.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", row)


class _Completion(msgspec.Struct):
    versions: list[int]


class _Turn(msgspec.Struct):
    completion: _Completion


class _Reward(msgspec.Struct):
    value: float
    status: RewardStatus


class RolloutFigures(msgspec.Struct):
    """The indexed parts of a rollout; decoding all parts takes three times as long."""

    turns: list[_Turn]
    reward: _Reward
    status: str
    reason: str


def _figures(body: bytes) -> tuple[str, str, float | None, int, int | None]:
    """Status, reason, reward, tokens and oldest Version of one rollout."""
    try:
        one = wire.decode(body, RolloutFigures, BODY_BYTES)
    except WireError as error:
        return UNREADABLE, str(error), None, 0, None
    versions = [version for turn in one.turns for version in turn.completion.versions]
    return (
        one.status,
        one.reason,
        one.reward.value if one.reward.status is RewardStatus.SCORED else None,
        len(versions),
        min(versions, default=None),
    )
