"""The archive: steps that no resume replays, moved out of the log into Parquet files, so that the log stops growing.

    <run_dir>/archive/steps-0-199.parquet    every row of the log that belongs to these steps and to nothing later

A row of such a file is a row of the table that its column `kind` names. The file is written, synced and renamed first.
Then one transaction removes its rows from the log and names the file in the table `shards`. A file that no row names
was left by a crash: it is never read, and is written again. So no row is lost, and no row is there twice.

Readers of the log (`log.snapshot`) see both as one log: `attach` shadows the log's tables with tables of equal names.
Bodies of rollouts and tasks stay in the files until a reader asks for them.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.errors import RunDirError
from shoal.experience.schema import SCHEMA
from shoal.files import replaced

FOLDER = "archive"
SHARD_BYTES = 256_000_000
"""Approximate bytes of rollouts in one file: a step is never split."""
ROWS_AT_ONCE = 512
"""Number of rollouts per row group, which are in memory at a time."""
VACUUM_PAGES = 512
"""Number of pages given back to the disk between two writes of other threads."""

_INDEXED = {
    "started": ("group_id",),
    "groups": ("group_id", "finished_seq"),
    "ended": ("group_id",),
    "consumed": ("finished_seq", "step"),
}

# Groups that were consumed by a step, or that ended by then and will never be; the rest depends on these.
_CHOOSE = (
    "CREATE TEMP TABLE IF NOT EXISTS settled(group_id TEXT PRIMARY KEY, finished_seq INTEGER)",
    "DELETE FROM temp.settled",
    "INSERT INTO temp.settled SELECT group_id, finished_seq FROM (SELECT group_id FROM consumed JOIN groups USING "
    "(finished_seq) WHERE step <= :through UNION SELECT group_id FROM ended WHERE after_step <= :through) "
    "LEFT JOIN groups USING (group_id)",
)
_WHERE = {
    "published": "version < (SELECT version FROM steps WHERE step = :through)",
    "started": "group_id IN (SELECT group_id FROM temp.settled)",
    "groups": "group_id IN (SELECT group_id FROM temp.settled)",
    "ended": "group_id IN (SELECT group_id FROM temp.settled)",
    "consumed": "step <= :through",
    "steps": "step <= :through",
    "trained": "step <= :through",
    "rollouts": "finished_seq IN (SELECT finished_seq FROM temp.settled)",
}


@cache
def _columns() -> dict[str, dict[str, str]]:
    """Names and SQL types of the columns of each table; the rollouts come last."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        described = {table: connection.execute(f"PRAGMA table_info({table})").fetchall() for table in _WHERE}
    return {table: {name: kind for _, name, kind, *_ in rows} for table, rows in described.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the archive."""

    name: str
    through: int
    """The last step of the file."""
    rows: dict[str, int]
    """Number of rows of each table."""


def write(run_dir: Path, through: int, shard_bytes: int = SHARD_BYTES) -> Shard | None:
    """Writes the file of the oldest steps in the log, at most up to `through`; None without such steps. Blocks.

    The newest step stays in the log, because a resume goes on after it.
    """
    import pyarrow.parquet as pq

    with closing(sqlite3.connect(f"{(run_dir / 'log.sqlite').resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        chosen = _steps_of_a_shard(connection, through, shard_bytes)
        if chosen is None:
            return None
        first, last = chosen
        folder, name, rows = run_dir / FOLDER, f"steps-{first}-{last}.parquet", dict.fromkeys(_WHERE, 0)
        schema, options = _schema(), {"compression": "zstd", "write_page_checksum": True}
        try:
            folder.mkdir(exist_ok=True)
            named = {name for (name,) in connection.execute("SELECT name FROM shards")}
            for file in folder.iterdir():
                if file.name.startswith("steps-") and file.name not in named:  # a crash left it
                    file.unlink()
            with (
                replaced(folder / name, private=True) as unfinished,
                pq.ParquetWriter(unfinished, schema, **options) as writer,
            ):
                for table, batch in _batches(connection, last):
                    writer.write_table(_table(schema, table, batch))
                    rows[table] += len(batch)
        except OSError as error:
            raise RunDirError(f"{folder} cannot be written: {error}; free space, then --resume") from error
    return Shard(name, last, rows)


def forget(connection: sqlite3.Connection, shard: Shard) -> None:
    """Removes a file's rows from the log, in the transaction that names the file."""
    _choose(connection, shard.through)
    for table, where in _WHERE.items():
        removed = connection.execute(f"DELETE FROM {table} WHERE {where}", {"through": shard.through}).rowcount
        assert removed == shard.rows[table], f"{removed} rows of {table}, {shard.rows[table]} in {shard.name}"
    connection.execute("INSERT INTO shards VALUES (?, ?)", (shard.name, shard.through))


def vacuum(connection: sqlite3.Connection) -> bool:
    """Gives some free pages of the log back to the disk; returns whether more are free."""
    (before,) = connection.execute("PRAGMA freelist_count").fetchone()
    connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    (after,) = connection.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < after < before)


def archived_through(connection: sqlite3.Connection) -> int:
    """The last step that is no longer in the log itself; -1 when all steps are."""
    (through,) = connection.execute("SELECT MAX(through) FROM shards").fetchone()
    return -1 if through is None else int(through)


def attach(connection: sqlite3.Connection, run_dir: Path) -> None:
    """Shadows the log's tables with tables that include its archive. Raises `RunDirError`."""
    names = connection.execute("SELECT name FROM shards ORDER BY through")
    attach_files(connection, [run_dir / FOLDER / name for (name,) in names])


def attach_files(connection: sqlite3.Connection, files: Sequence[Path]) -> None:
    """Shadows a connection's tables with tables that include the rows of some files. Raises `RunDirError`."""
    if not files:
        return
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise RunDirError(f"{missing} is missing: steps of the log were moved there")
    there = _tables(connection)
    for table, columns in _columns().items():
        if table != "rollouts":
            connection.execute(f"CREATE TEMP TABLE all_{table}({', '.join(columns)})")
            for column in _INDEXED.get(table, ()):
                connection.execute(f"CREATE INDEX temp.{table}_by_{column} ON all_{table}({column})")
            into = f"INSERT INTO temp.all_{table}({', '.join(columns)})"
            if table in there:
                values = (name if name in there[table] else "NULL" for name in columns)
                connection.execute(f"{into} SELECT {', '.join(values)} FROM main.{table}")
    connection.execute("CREATE TEMP TABLE archived(finished_seq, position, PRIMARY KEY(finished_seq, position))")
    for file in files:
        with _reading(file) as opened:
            _load(connection, opened)
    connection.create_function("moved_value", 2, moved_value(files, spans))
    views = {table: f"SELECT * FROM temp.all_{table}" for table in _WHERE if table not in ("groups", "rollouts")}
    views["groups"] = (
        "SELECT finished_seq, group_id, COALESCE(task, moved_value(finished_seq, NULL)) AS task, "
        "admitted_version, after_step, size FROM temp.all_groups"
    )
    views["rollouts"] = (
        "SELECT finished_seq, position, body FROM main.rollouts UNION ALL SELECT finished_seq, position, "
        "moved_value(finished_seq, position) FROM temp.archived"
    )
    for table, select in views.items():
        connection.execute(f"DROP VIEW IF EXISTS temp.{table}")
        connection.execute(f"CREATE TEMP VIEW {table} AS {select}")


def _tables(connection: sqlite3.Connection) -> dict[str, set[str]]:
    """Names of the log's own tables, with their columns; a log of an older Shoal lacks some."""
    names = [name for (name,) in connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
    return {name: {column for _, column, *_ in connection.execute(f"PRAGMA main.table_info({name})")} for name in names}


def has_sizes(connection: sqlite3.Connection) -> bool:
    """Whether the groups of a log state how many rollouts they have."""
    return bool(connection.execute("SELECT 1 FROM pragma_table_info('groups') WHERE name = 'size'").fetchone())


def spans(file: Path) -> list[tuple[bool, int, int, int]]:
    """The row groups of tasks and of bodies: whether of bodies, lowest and highest finished_seq, number. Blocks."""
    found = []
    with _reading(file) as opened:
        at = opened.schema_arrow.get_field_index("finished_seq")
        for row_group in range(opened.metadata.num_row_groups):
            described = opened.metadata.row_group(row_group)
            kind, seqs = described.column(0).statistics.min, described.column(at).statistics
            if kind in ("groups", "rollouts"):
                found.append((kind == "rollouts", seqs.min, seqs.max, row_group))
    return found


def moved_value(
    files: Sequence[Path], spans_of: Callable[[Path], list[tuple[bool, int, int, int]]]
) -> Callable[[int, int | None], bytes | None]:
    """Reads the body of a rollout, or the task of a group when no position is given; None when no file has it.

    `spans_of` is `spans`, which a caller with many reads caches. A few row groups are in memory at a time.
    """

    @lru_cache(maxsize=4)
    def rows(shard: int, row_group: int) -> dict[tuple[int, int | None], bytes]:
        columns = ["finished_seq", "position", "task", "body"]
        with _reading(files[shard]) as opened:
            seqs, positions, tasks, bodies = opened.read_row_group(row_group, columns).to_pydict().values()
        values = (body if task is None else task for task, body in zip(tasks, bodies, strict=True))
        return dict(zip(zip(seqs, positions, strict=True), values, strict=True))

    places: list[tuple[bool, int, int, int, int]] = []

    def moved(seq: int, position: int | None) -> bytes | None:
        if not places:
            places.extend((*span, shard) for shard, file in enumerate(files) for span in spans_of(file))
        for at, (bodies, lowest, highest, row_group, shard) in enumerate(places):
            if bodies == (position is not None) and lowest <= seq <= highest:
                with suppress(KeyError):  # groups do not end in the order of their numbers
                    found = rows(shard, row_group)[seq, position]
                    places.insert(0, places.pop(at))  # the next one asked for is often near
                    return found
        return None

    return moved


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    """Opens a file of the archive. Raises `RunDirError` when the file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            yield opened
    except (OSError, pa.ArrowException) as error:
        raise RunDirError(f"{file} cannot be read: {error}") from error


def _load(connection: sqlite3.Connection, opened: Any) -> None:
    """Puts the rows of a file into the tables, except tasks and bodies."""
    for row_group in range(opened.metadata.num_row_groups):
        table = opened.metadata.row_group(row_group).column(0).statistics.min
        there = opened.schema_arrow.names
        kept = [name for name, kind in _columns()[table].items() if kind != "BLOB" and name in there]
        rows = opened.read_row_group(row_group, kept).to_pydict()
        values = zip(*(rows[name] for name in kept), strict=True)
        into = "archived" if table == "rollouts" else f"all_{table}"
        marks = ", ".join("?" * len(kept))
        connection.executemany(f"INSERT INTO temp.{into}({', '.join(kept)}) VALUES ({marks})", values)


def _schema() -> Any:
    import pyarrow as pa

    types = {"BLOB": pa.binary(), "TEXT": pa.string(), "INTEGER": pa.int64()}
    every = {name: types[kind] for columns in _columns().values() for name, kind in columns.items()}
    return pa.schema([("kind", pa.string()), *every.items()])


def _table(schema: Any, kind: str, rows: Sequence[tuple[object, ...]]) -> Any:
    """Rows of one table of the log as a table of the file; columns of other tables are null."""
    import pyarrow as pa

    columns = dict(zip(_columns()[kind], zip(*rows, strict=True), strict=True))
    nothing = (None,) * len(rows)
    return pa.table({"kind": (kind,) * len(rows), **{n: columns.get(n, nothing) for n in schema.names[1:]}}, schema)


def _choose(connection: sqlite3.Connection, through: int) -> None:
    for statement in _CHOOSE:
        connection.execute(statement, {"through": through})


def _steps_of_a_shard(connection: sqlite3.Connection, through: int, shard_bytes: int) -> tuple[int, int] | None:
    """The first and the last step of the next file."""
    first, last, size = None, -1, 0
    for step, step_bytes in connection.execute(
        "SELECT step, SUM(LENGTH(body)) FROM steps LEFT JOIN consumed USING (step) LEFT JOIN rollouts USING "
        "(finished_seq) WHERE step <= ? AND step < (SELECT MAX(step) FROM steps) GROUP BY step ORDER BY step",
        (through,),
    ):
        size += step_bytes or 0
        if first is not None and size > shard_bytes:
            break
        first, last = step if first is None else first, step
    return None if first is None else (first, last)


def _batches(connection: sqlite3.Connection, through: int) -> Iterator[tuple[str, list[tuple[object, ...]]]]:
    """Rows of the file, a row group at a time, each of one table; rollouts come last, in order."""
    _choose(connection, through)
    for table, columns in _columns().items():
        select = f"SELECT {', '.join(columns)} FROM main.{table} WHERE {_WHERE[table]} ORDER BY 1, 2"
        rows = connection.execute(select, {"through": through})
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            yield table, batch
