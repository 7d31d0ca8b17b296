"""A run's rollouts in a table of the viewer's own, so that any of a million are found without reading all bodies.

A thread reads the log a few groups at a time, newest first, then its archive, and then what is added. Each reading is
a short snapshot, so that the run's own writing is never held up. Bodies stay where they are; the table, a temporary
file, says where. Steps are numbered as in metrics.jsonl, from 1. A log without a -wal file has no writer, and is opened
so that not even SQLite puts a file beside it.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal import wire
from shoal.errors import RunDirError, ShoalError, WireError
from shoal.experience import archive
from shoal.experience.log import BODY_BYTES, FILE
from shoal.experience.schema import FORMAT

GROUPS_AT_ONCE = 64
POLL_S = 1.0
PER_PAGE = 50
TEXT_SEARCH_S = 5.0
"""Longest search for a text in bodies; what was found until then is shown."""
UNREADABLE = "unreadable"
_SCHEMA = """
CREATE TABLE rollouts(seq INTEGER, position INTEGER, task TEXT, status TEXT, reason TEXT, reward REAL, tokens INTEGER,
    version INTEGER, cut INTEGER, step INTEGER, shard INTEGER, row_group INTEGER, PRIMARY KEY(seq, position));
CREATE INDEX rollouts_by_step ON rollouts(step, reward);
CREATE INDEX rollouts_by_reward ON rollouts(reward, seq DESC);
CREATE TABLE groups(seq INTEGER PRIMARY KEY, id TEXT, admitted INTEGER, step INTEGER, version INTEGER, dropped TEXT,
    peer TEXT, shard INTEGER, row_group INTEGER);
CREATE INDEX groups_by_id ON groups(id);
"""
_NEW = """SELECT finished_seq, group_id, task, groups.admitted_version, step + 1, steps.version, reason, peer_id
FROM groups LEFT JOIN started USING (group_id)
LEFT JOIN consumed USING (finished_seq) LEFT JOIN steps USING (step) LEFT JOIN ended USING (group_id)"""
_BODY = """COALESCE((SELECT body FROM log.rollouts WHERE finished_seq = seq AND log.rollouts.position = found.position),
archived_value(shard, row_group, seq, found.position))"""
_ROW = f"""SELECT seq, position, task, status, COALESCE(NULLIF(reason, ''), (SELECT dropped FROM groups WHERE
groups.seq = found.seq), ''), reward, tokens, found.version, step, {_BODY}
FROM rollouts AS found WHERE seq = ? AND found.position = ?"""
_ORDERS = {
    "newest": "seq DESC, position DESC",
    "worst": "reward, seq DESC",
    "best": "reward DESC, seq DESC",
    "longest": "tokens DESC, seq DESC",
}


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rollouts are wanted, in which order; what is None or empty is not asked."""

    run: str = ""
    task: str = ""
    status: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    step: int | None = None
    version: int | None = None
    text: str = ""
    sort: Literal["newest", "worst", "best", "longest"] = "newest"
    page: int = 1

    def where(self) -> tuple[list[str], list[object]]:
        """The conditions in SQL, and their values; the text's is last."""
        asked = {
            "task = ?": self.task or None,
            "reward >= ?": self.reward_from,
            "reward <= ?": self.reward_to,
            "step = ?": self.step,
            "found.version = ?": self.version,
        }
        conditions = [sql for sql, value in asked.items() if value is not None]
        values: list[object] = [value for value in asked.values() if value is not None]
        if self.status == "unscored":
            conditions.append("reward IS NULL")
        elif self.status:
            conditions.append("status = ?")
            values.append(self.status)
        if self.sort in ("worst", "best"):
            conditions.append("reward IS NOT NULL")
        if self.text:
            conditions.append(f"instr({_BODY}, ?)")
            values.append(self.text.encode())
        return conditions, values


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


@dataclass(frozen=True, slots=True)
class Found:
    """One page of a list."""

    rows: list[Row]
    total: int | None
    """None where a text was looked for: that is not counted to the end."""
    more: bool
    gave_up: bool
    """Whether the search for a text took too long."""


@dataclass(frozen=True, slots=True)
class GroupFound:
    """A group with its task and bodies as the log has them."""

    seq: int
    id: str
    admitted: int
    step: int | None
    version: int | None
    """That it was consumed under."""
    dropped: str | None
    peer: str | None
    """None of an own group."""
    task: bytes
    bodies: tuple[bytes, ...]


class _Completion(msgspec.Struct):
    versions: list[int]
    finish_reason: str = ""


class _Turn(msgspec.Struct):
    completion: _Completion


class _Reward(msgspec.Struct):
    value: float
    status: str


class _Rollout(msgspec.Struct):
    turns: list[_Turn]
    reward: _Reward
    status: str
    reason: str


class _Task(msgspec.Struct):
    service: str


class RolloutIndex:
    """The table of one run. `close` ends its thread."""

    def __init__(self, run_dir: Path, file: Path) -> None:
        self.problem = ""
        """Why the log cannot be read; empty when it can."""
        self.complete = False
        """Whether all that the log had was read once."""
        self._run_dir, self._file = run_dir, file
        self._low = self._high = self._step = self._ended = -1
        self._shards: list[Path] = []
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
        """A page of what is wanted. Raises `RunDirError`."""
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

    def group(self, seq: int) -> GroupFound:
        """One group. Raises `RunDirError` when it is not there."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT seq, id, admitted, step, version, dropped, peer, COALESCE((SELECT task FROM log.groups WHERE "
                "finished_seq = seq), archived_value(shard, row_group, seq, NULL)) FROM groups WHERE seq = ?",
                (seq,),
            ).fetchone()
            if row is None:
                raise RunDirError(f"group {seq} is not in the log, or was not read yet")
            bodies = f"SELECT {_BODY} FROM rollouts AS found WHERE seq = ? ORDER BY position"
            found = (*row, tuple(body for (body,) in connection.execute(bodies, (seq,))))
        return GroupFound(*found)

    def tasks(self) -> list[str]:
        """Names of the tasks that there are rollouts of."""
        return [name for (name,) in self._all("SELECT DISTINCT task FROM rollouts ORDER BY 1")]

    def count(self) -> int:
        """How many rollouts were read so far."""
        return int(self._all("SELECT COUNT(*) FROM rollouts")[0][0])

    def cut_by_step(self) -> list[tuple[int, float]]:
        """The share of answers whose last turn used up its tokens, step by step."""
        return self._all("SELECT step, AVG(cut) FROM rollouts WHERE step IS NOT NULL AND tokens > 0 GROUP BY step")

    def _all(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self._file)) as connection:
            return connection.execute(query).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to the table with the log beside it. Raises `RunDirError`."""
        values = archive.Values(list(self._shards))
        try:
            with closing(sqlite3.connect(self._file, uri=True)) as connection:
                connection.execute("ATTACH ? AS log", (log_uri(self._run_dir),))
                connection.create_function("archived_value", 4, values.get)
                yield connection
        except sqlite3.Error as error:
            raise RunDirError(f"{self._run_dir / FILE} cannot be read: {error}") from error

    def _follow(self) -> None:
        with closing(sqlite3.connect(self._file, isolation_level=None)) as index:
            index.execute("PRAGMA synchronous=OFF")
            while not self._stop.is_set():
                try:
                    more = (self._run_dir / FILE).exists() and self._catch_up(index)
                    self.problem = ""
                except (sqlite3.Error, ShoalError, OSError) as error:
                    self.problem, more = str(error), False
                if not more:
                    self.complete = not self.problem
                    self._stop.wait(POLL_S)

    def _catch_up(self, index: sqlite3.Connection) -> bool:
        """Reads some groups that are not in the table yet; whether there were any."""
        with closing(sqlite3.connect(log_uri(self._run_dir), uri=True, isolation_level=None, timeout=30.0)) as log:
            log.execute("BEGIN")
            if self._high < 0:
                _check(log, self._run_dir)
                self._high = self._low = log.execute("SELECT COALESCE(MAX(finished_seq), 0) FROM groups").fetchone()[0]
            newest = log.execute("SELECT COALESCE(MAX(step), -1) FROM steps").fetchone()[0]
            index.execute("BEGIN")
            self._settle(index, log)
            order = "WHERE finished_seq > ? ORDER BY finished_seq"
            groups = log.execute(f"{_NEW} {order} LIMIT ?", (self._high, GROUPS_AT_ONCE)).fetchall()
            if groups:
                self._high = groups[-1][0]
            else:
                order = "WHERE finished_seq <= ? ORDER BY finished_seq DESC"
                groups = log.execute(f"{_NEW} {order} LIMIT ?", (self._low, GROUPS_AT_ONCE)).fetchall()
                self._low = groups[-1][0] - 1 if groups else 0
            for group in groups:
                bodies = log.execute("SELECT position, body FROM rollouts WHERE finished_seq = ?", (group[0],))
                _insert_group(index, group, None, None)
                _insert_rollouts(index, group, bodies, None, None)
            index.execute("COMMIT")
            self._step = self._ended = newest
            names = [name for (name,) in log.execute("SELECT name FROM shards ORDER BY through DESC")]
        new = [file for name in names if (file := self._run_dir / archive.FOLDER / name) not in self._shards]
        if not groups and new:
            self._read_shard(index, new[0])
        return bool(groups or new)

    def _settle(self, index: sqlite3.Connection, log: sqlite3.Connection) -> None:
        """Says of groups that were read before which step consumed them, or why they were dropped."""
        consumed = log.execute(
            "SELECT step + 1, version, finished_seq FROM consumed JOIN steps USING (step) WHERE step > ?", (self._step,)
        ).fetchall()
        index.executemany("UPDATE groups SET step = ?, version = ? WHERE seq = ?", consumed)
        steps = ((step, seq) for step, _, seq in consumed)
        index.executemany("UPDATE rollouts SET step = ? WHERE seq = ?", steps)
        ended = log.execute("SELECT reason, group_id FROM ended WHERE after_step >= ?", (self._ended,))
        index.executemany("UPDATE groups SET dropped = ? WHERE id = ?", ended)

    def _read_shard(self, index: sqlite3.Connection, file: Path) -> None:
        """Puts the rows of a file of the archive into the table, those that are there with their new place only."""
        shard = len(self._shards)
        known = {seq for (seq,) in index.execute("SELECT seq FROM groups")}
        groups: dict[int, tuple[Any, ...]] = {}
        seen: dict[str, dict[Any, Any]] = {"started": {}, "consumed": {}, "ended": {}, "steps": {}}
        index.execute("BEGIN")
        for table, number, rows in archive.row_groups(file):
            if self._stop.is_set():
                break
            if table in ("groups", "rollouts"):
                there = [(shard, number, *row[: 1 + (table == "rollouts")]) for row in rows if row[0] in known]
                place = "seq = ? AND position = ?" if table == "rollouts" else "seq = ?"
                index.executemany(f"UPDATE {table} SET shard = ?, row_group = ? WHERE {place}", there)
            if table in seen:
                seen[table] |= {row[table == "started"]: row for row in rows}
            elif table == "groups":
                # Consumed and ended rows follow; the group is completed when its rollouts come.
                groups |= {row[0]: (*row[:4], number) for row in rows if row[0] not in known}
            elif table == "rollouts":
                for seq, position, body in rows:
                    if seq in groups:
                        group = _joined(groups[seq], seen)
                        if position == 0:
                            _insert_group(index, group, shard, groups[seq][4])
                        _insert_rollouts(index, group, [(position, body)], shard, number)
        self._shards = [*self._shards, file]  # before anybody can see that a body is there
        index.execute("COMMIT")


def log_uri(run_dir: Path) -> str:
    """Where SQLite reads a run's log, and writes nothing."""
    path = (run_dir / FILE).resolve()
    return f"{path.as_uri()}?mode=ro{'' if path.with_name(f'{FILE}-wal').exists() else '&immutable=1'}"


def _check(log: sqlite3.Connection, run_dir: Path) -> None:
    there = log.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    written = log.execute("SELECT value FROM meta WHERE key = 'format'").fetchone() if there else ("none yet",)
    if written != (FORMAT,):
        raise RunDirError(f"{run_dir / FILE}: expected a log of format {FORMAT}, got {written[0]}")


def _joined(group: tuple[Any, ...], seen: dict[str, dict[Any, Any]]) -> tuple[Any, ...]:
    """A row as `_NEW` gives it, of the tables of a file of the archive."""
    seq, group_id, task, admitted, _ = group
    step = seen["consumed"].get(seq, (None, None))[1]
    version = seen["steps"].get(step, (None, None))[1]
    dropped = seen["ended"].get(group_id, (None, None, None))[2]
    peer = seen["started"][group_id][5]
    return seq, group_id, task, admitted, None if step is None else step + 1, version, dropped, peer


def _insert_group(index: sqlite3.Connection, group: Sequence[Any], shard: int | None, row_group: int | None) -> None:
    seq, group_id, _, *rest = group
    row = (seq, group_id, *rest, shard, row_group)
    index.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _insert_rollouts(
    index: sqlite3.Connection,
    group: Sequence[Any],
    bodies: Iterable[tuple[int, bytes]],
    shard: int | None,
    row_group: int | None,
) -> None:
    try:
        task = wire.decode(group[2], _Task, BODY_BYTES).service
    except WireError:
        task = UNREADABLE
    rows = ((group[0], position, task, *_figures(body), group[4], shard, row_group) for position, body in bodies)
    index.executemany("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _figures(body: bytes) -> tuple[str, str, float | None, int, int | None, bool]:
    """Status, reason, reward, tokens, oldest Version and whether it was cut, of one rollout."""
    try:
        one = wire.decode(body, _Rollout, BODY_BYTES)
    except WireError as error:
        return UNREADABLE, str(error), None, 0, None, False
    versions = [version for turn in one.turns for version in turn.completion.versions]
    return (
        one.status,
        one.reason,
        one.reward.value if one.reward.status == "scored" else None,
        len(versions),
        min(versions, default=None),
        bool(one.turns) and one.turns[-1].completion.finish_reason == "length",
    )
