"""Durable state of the Tinker server in SQLite: sessions, models, requests with their results, checkpoints, samplers.

A request is committed before its future is acknowledged, so a client's future resolves after any end of the server.
Clients are known by a digest of their key; the file contains no key.
"""

import hashlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec

from shoal.errors import RequestRefused, RunDirError
from shoal.files import make_durable
from shoal.trainer.messages import Adapter

MOST_TTL_S = 10 * 365 * 86_400
"""Ten years, as the Tinker documentation bounds a time to live."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, base TEXT NOT NULL, adapter TEXT NOT NULL, created REAL NOT NULL,
    folder TEXT NOT NULL DEFAULT '', optimizer INTEGER NOT NULL DEFAULT 0, state_at INTEGER NOT NULL DEFAULT 0,
    closed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, base TEXT NOT NULL, path TEXT NOT NULL, folder TEXT NOT NULL,
    version INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, target TEXT NOT NULL, kind TEXT NOT NULL,
    body BLOB NOT NULL, state TEXT NOT NULL DEFAULT 'pending', result BLOB, created REAL NOT NULL, digest BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_target ON requests (target, number);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, folder TEXT NOT NULL, created REAL NOT NULL,
    bytes INTEGER NOT NULL, version INTEGER NOT NULL, expires REAL
);
"""
KEPT = "coalesce(expires, 9e99) > ?"
"""Condition of a checkpoint that has not expired."""
_PASSING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""SQLite errors of a full disk, or of another program's lock."""
KEPT_S = 86_400.0
"""Seconds for which the result of a request can be fetched."""


def owner_of(key: str) -> str:
    """Digest by which the client with a key is known; slow to compute, since people choose weak keys."""
    return hashlib.scrypt(key.encode(), salt=b"shoal tinker owner", n=1 << 14, r=8, p=1, dklen=16).hex()


@dataclass(frozen=True)
class StoredModel:
    """Model in training: what it started from, and the last state on disk."""

    id: str
    session: str
    base: str
    adapter: str
    """`lora` as JSON."""
    created: float
    folder: str
    """Folder of the last state on disk; empty for the base model's weights."""
    optimizer: bool
    state_at: int
    """Number of the last request that the state on disk contains."""
    closed: bool

    @property
    def lora(self) -> Adapter:
        """Settings of the adapter."""
        return msgspec.json.decode(self.adapter, type=Adapter)


@dataclass(frozen=True)
class Sampler:
    """Weights that clients sample from."""

    id: str
    session: str
    base: str
    path: str
    folder: str
    """Folder of the merged weights; empty for the base model's."""
    version: int = 0
    """Number of optimizer steps behind the weights."""


@dataclass(frozen=True)
class StoredRequest:
    """One request and the state of its future: pending, done or failed."""

    number: int
    id: str
    target: str
    kind: str
    body: bytes
    state: str
    result: bytes | None
    digest: bytes
    """Digest of kind and body."""


@dataclass(frozen=True)
class SavedWeights:
    """Saved weights under a `tinker://` path."""

    path: str
    model: str
    kind: str
    folder: str
    created: float
    bytes: int
    version: int
    expires: float | None


class Store:
    """One file. A returned write survives the loss of power; without room it raises `sqlite3.OperationalError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        make_durable(self._db)
        self._db.executescript(SCHEMA)

    def check_passes(self, error: sqlite3.Error) -> None:
        """Raises `RunDirError` for an error that does not pass by itself when the disk has room."""
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF not in _PASSING:
            raise RunDirError(f"{self._path}: expected a database that can be written, got: {error}") from error

    def forget(self, before: float) -> None:
        """Deletes finished requests older than `before` that no restart repeats, so that their bodies are empty."""
        self._db.execute(
            "DELETE FROM requests WHERE state != 'pending' AND kind != 'create' AND created < ? AND (body = x'' OR "
            "number <= (SELECT coalesce(min(CASE closed WHEN 0 THEN state_at END), 1 << 62) FROM models "
            "WHERE id = target))",
            (before,),
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Makes the changes inside durable together, or none of them."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def add_session(self, id_: str, owner: str) -> None:
        """Adds a session of a client."""
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?)", (id_, owner, time.time()))

    def owner(self, session: str) -> str | None:
        """Client that owns the session."""
        row = self._db.execute("SELECT owner FROM sessions WHERE id = ?", (session,)).fetchone()
        return None if row is None else str(row[0])

    def sessions(self, owner: str) -> list[str]:
        """Sessions of a client, newest first."""
        rows = self._db.execute("SELECT id FROM sessions WHERE owner = ? ORDER BY created DESC", (owner,))
        return [str(row[0]) for row in rows]

    def open_models(self, owner: str) -> list[StoredModel]:
        """Models of a client that are not unloaded, nor about to be."""
        unloading = "SELECT 1 FROM requests WHERE target = models.id AND kind = 'unload' AND state = 'pending'"
        mine = "session IN (SELECT id FROM sessions WHERE owner = ?)"
        return list(self._models(f"{mine} AND closed = 0 AND NOT EXISTS ({unloading})", owner))

    def add_model(self, id_: str, session: str, base: str, adapter: str, folder: str, optimizer: bool) -> None:
        """Adds a model that starts from its base, or from the state in a folder; a second call changes nothing."""
        self._db.execute(
            "INSERT OR IGNORE INTO models (id, session, base, adapter, created, folder, optimizer) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id_, session, base, adapter, time.time(), folder, optimizer),
        )

    def set_state(self, model: str, folder: str, at: int) -> None:
        """Records the state on disk, which contains every request up to `at`; their bodies are emptied."""
        self._db.execute("UPDATE models SET folder = ?, optimizer = 1, state_at = ? WHERE id = ?", (folder, at, model))
        self._db.execute("UPDATE requests SET body = x'' WHERE target = ? AND number <= ?", (model, at))

    def close_model(self, model: str) -> None:
        """Records that a model is unloaded."""
        self._db.execute("UPDATE models SET closed = 1 WHERE id = ?", (model,))

    def model(self, id_: str) -> StoredModel | None:
        """One model."""
        return next(self._models("id = ?", id_), None)

    def models(self, session: str | None = None) -> list[StoredModel]:
        """Models of a session, or of all."""
        return list(self._models("?1 IS NULL OR session = ?1", session))

    def _models(self, where: str, value: str | None) -> Iterator[StoredModel]:
        with closing(self._db.execute(f"SELECT * FROM models WHERE {where} ORDER BY created", (value,))) as rows:
            for row in rows:
                id_, session, base, adapter, created, folder, optimizer, state_at, closed = row
                yield StoredModel(id_, session, base, adapter, created, folder, bool(optimizer), state_at, bool(closed))

    def add_sampler(self, sampler: Sampler) -> None:
        """Adds a sampler; a second call changes nothing."""
        self._db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?)", astuple(sampler))

    def sampler(self, id_: str) -> Sampler | None:
        """One sampler."""
        row = self._db.execute("SELECT * FROM samplers WHERE id = ?", (id_,)).fetchone()
        return None if row is None else Sampler(*row)

    def loose(self, session: str) -> list[str]:
        """Folders of a session's samplers that no checkpoint names, oldest first."""
        query = (
            "SELECT folder FROM samplers WHERE session = ? AND folder != '' AND folder NOT IN "
            "(SELECT folder FROM checkpoints) GROUP BY folder ORDER BY max(rowid)"
        )
        return [str(row[0]) for row in self._db.execute(query, (session,))]

    def sessions_of(self, folder: str) -> list[str]:
        """Sessions with a sampler of the weights in a folder."""
        rows = self._db.execute("SELECT DISTINCT session FROM samplers WHERE folder = ?", (folder,))
        return [str(row[0]) for row in rows]

    def samplers(self, session: str) -> list[Sampler]:
        """Samplers of a session, oldest first."""
        rows = self._db.execute("SELECT * FROM samplers WHERE session = ? ORDER BY rowid", (session,))
        return [Sampler(*row) for row in rows]

    def add_request(self, id_: str, target: str, kind: str, body: bytes) -> tuple[StoredRequest, bool]:
        """Request of an id, and whether it is new: a client that asks twice gets the first one's future.

        Raises `RequestRefused` when the id was another request's.
        """
        digest = hashlib.blake2b(kind.encode() + b"\0" + body, digest_size=16).digest()
        new = self._db.execute(
            "INSERT OR IGNORE INTO requests (id, target, kind, body, created, digest) VALUES (?, ?, ?, ?, ?, ?)",
            (id_, target, kind, body, time.time(), digest),
        ).rowcount
        request = self.request(id_)
        assert request is not None
        if not new and request.digest != digest:
            last = id_.rpartition("/")[2]
            raise RequestRefused(
                f"seq_id: {last} was another request, {request.kind}; number the requests of a model, each once"
            )
        return request, bool(new)

    def request(self, id_: str) -> StoredRequest | None:
        """One request."""
        return next(self._requests("id = ?", (id_,)), None)

    def repeated(self, model: StoredModel) -> list[StoredRequest]:
        """Finished requests that bring a model from its state on disk to where it is, in order."""
        where = "target = ? AND number > ? AND state != 'pending' AND body != x''"
        return list(self._requests(where, (model.id, model.state_at)))

    def failed(self, target: str, kind: str) -> int:
        """Number of requests of a kind that failed."""
        query = "SELECT count(*) FROM requests WHERE target = ? AND kind = ? AND state = 'failed'"
        return int(self._db.execute(query, (target, kind)).fetchone()[0])

    def pending(self) -> list[StoredRequest]:
        """Requests without a result, in order."""
        return list(self._requests("state = 'pending'", ()))

    def _requests(self, where: str, values: tuple[str | int, ...]) -> Iterator[StoredRequest]:
        columns = "number, id, target, kind, body, state, result, digest"
        with closing(self._db.execute(f"SELECT {columns} FROM requests WHERE {where} ORDER BY number", values)) as rows:
            for row in rows:
                yield StoredRequest(*row)

    def resolve(self, id_: str, result: bytes, *, failed: bool = False, repeats: bool = False) -> None:
        """Records the result of a request, or why it failed; only one that a restart `repeats` keeps its body."""
        state, body = "failed" if failed else "done", "body" if repeats else "x''"
        self._db.execute(f"UPDATE requests SET state = ?, result = ?, body = {body} WHERE id = ?", (state, result, id_))

    def drop_gradient(self, step: StoredRequest) -> None:
        """Empties the bodies of the requests whose gradients a refused step has cleared."""
        last = (
            "SELECT coalesce(max(number), 0) FROM requests WHERE target = ?1 AND kind = 'optim_step' AND state = 'done'"
        )
        where = f"target = ?1 AND number < ?2 AND number > ({last})"
        self._db.execute(f"UPDATE requests SET body = x'' WHERE {where}", (step.target, step.number))

    def add_checkpoint(self, checkpoint: SavedWeights) -> str:
        """Adds a checkpoint, in place of one with the same path, whose folder it returns; empty without one."""
        before = self._db.execute("SELECT folder FROM checkpoints WHERE path = ?", (checkpoint.path,)).fetchone()
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(checkpoint))
        return "" if before is None else str(before[0])

    def checkpoint(self, path: str) -> SavedWeights | None:
        """Checkpoint of a path; None also when its time is over."""
        row = self._db.execute(f"SELECT * FROM checkpoints WHERE path = ? AND {KEPT}", (path, time.time())).fetchone()
        return None if row is None else SavedWeights(*row)

    def checkpoints(self, model: str) -> list[SavedWeights]:
        """Checkpoints of a model that have not expired, oldest first."""
        query = f"SELECT * FROM checkpoints WHERE model = ? AND {KEPT} ORDER BY created"
        rows = self._db.execute(query, (model, time.time()))
        return [SavedWeights(*row) for row in rows]

    def expired(self, now: float) -> list[SavedWeights]:
        """Expired checkpoints."""
        return [SavedWeights(*row) for row in self._db.execute("SELECT * FROM checkpoints WHERE expires < ?", (now,))]

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Sets the time until which a checkpoint is kept; None keeps it."""
        self._db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def remove_checkpoint(self, path: str) -> None:
        """Forgets a checkpoint."""
        self._db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))
