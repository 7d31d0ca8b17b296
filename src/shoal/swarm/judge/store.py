"""The judge's store is one SQLite file.

    rounds      secret seed and signed statement of each round
    challenges  a `Record` each; no questions: they follow from the seed

A challenge unanswered at its deadline has the score 0, so takers cannot choose by leaving challenges unanswered.
"""

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from shoal import wire
from shoal.errors import RunDirError
from shoal.files import make_durable
from shoal.swarm.judge.messages import Condition, GradedAnswer

FILE = "judge.sqlite"
FORMAT = 2
NEWEST = 10
"""Challenges of a peer in its score on the leaderboard, under any model name."""
CONFIDENCE = 0.95
"""Probability that no peer on the leaderboard is ever worse than its row says, for any number of peers that answered,
whenever it stops."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds(number INTEGER PRIMARY KEY, seed BLOB NOT NULL, statement BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS challenges(
    id TEXT PRIMARY KEY, sitting INTEGER NOT NULL REFERENCES rounds(number), peer_id TEXT NOT NULL,
    model TEXT NOT NULL, arm TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, sent_s REAL NOT NULL,
    deadline_s REAL NOT NULL, ask BLOB NOT NULL, answers BLOB, marks BLOB, score REAL,
    UNIQUE(sitting, peer_id, model, attempt));
CREATE INDEX IF NOT EXISTS newest_of_peer ON challenges(peer_id, sent_s, deadline_s, score);
"""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A stored challenge; `score` is None while it is open."""

    id: str
    sitting: int
    peer_id: str
    model: str
    arm: Condition
    round: int
    attempt: int
    sent_s: float
    """Unix time of the request by the taker's clock; later for each request."""
    deadline_s: float
    ask: bytes
    """Request signed by the taker, as are the answers."""
    answers: bytes | None = None
    marks: bytes | None = None
    """Wire bytes of the graded answers."""
    score: float | None = None

    @property
    def graded(self) -> tuple[GradedAnswer, ...]:
        """Graded answers, in order; empty for an unanswered challenge."""
        return wire.decode(self.marks, tuple[GradedAnswer, ...]) if self.marks else ()


@dataclass(frozen=True, slots=True)
class Standing:
    """One row of the leaderboard: a peer. Names cost nothing, so another model name makes no further row."""

    peer_id: str
    model: str
    arm: Condition
    round: int
    """Training round of the newest challenge, as are model and condition."""
    challenges: int
    unanswered: int
    score: float
    """Mean pass@1 of the newest `NEWEST` challenges."""
    at_least: float
    """Lower bound of the peer's pass@1; rows follow it, so many attempts do not raise a rank."""
    specialties: dict[str, float]
    """Share of right answers among the newest `NEWEST` challenges."""


class JudgeStore:
    """Store of a judge: one connection, used by one thread. Invariant: every returned value was committed."""

    def __init__(self, folder: Path) -> None:
        """Raises `RunDirError`."""
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, isolation_level=None)
            path.chmod(0o600)  # it holds seeds that are still secret
            (tables,) = self._row("SELECT COUNT(*) FROM sqlite_master")
            (version,) = self._row("PRAGMA user_version")
            if tables and version != FORMAT:
                raise RunDirError(f"{path}: expected format {FORMAT}, got {version}; begin in a new folder")
            make_durable(self._connection)
            self._connection.executescript(f"PRAGMA user_version={FORMAT}; {_SCHEMA}")
        except (OSError, sqlite3.DatabaseError) as error:
            raise RunDirError(f"{path} cannot be written: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def put_round(self, number: int, seed: bytes, statement: bytes) -> None:
        """Stores a round with its seed and its signed `Round`."""
        self._connection.execute("INSERT INTO rounds VALUES(?, ?, ?)", (number, seed, statement))

    def rounds(self, most: int) -> list[tuple[bytes, bytes]]:
        """Seed and statement of the newest rounds, newest first; the first may not have opened yet."""
        rows = self._connection.execute("SELECT seed, statement FROM rounds ORDER BY number DESC LIMIT ?", (most,))
        return rows.fetchall()

    def round(self, number: int) -> tuple[bytes, bytes] | None:
        """Seed and statement of a round."""
        found: tuple[bytes, bytes] | None = self._row("SELECT seed, statement FROM rounds WHERE number = ?", number)
        return found

    def issue(self, record: Record) -> None:
        """Stores a new challenge."""
        values = msgspec.structs.astuple(record)
        self._connection.execute(f"INSERT INTO challenges VALUES({', '.join('?' * len(values))})", values)

    def answer(self, id_: str, answers: bytes, graded: Sequence[GradedAnswer], score: float) -> None:
        """Stores answers and grades of an open challenge."""
        changes = (answers, wire.encode(graded), score, id_)
        self._connection.execute(
            "UPDATE challenges SET answers = ?, marks = ?, score = ? WHERE id = ? AND score IS NULL", changes
        )

    def challenge(self, id_: str) -> Record | None:
        """Finds a challenge by id."""
        found: Record | None = msgspec.convert(self._row("SELECT * FROM challenges WHERE id = ?", id_), Record | None)
        return found

    def attempts(self, sitting: int, peer_id: str, model: str) -> int:
        """Number of challenges issued to a peer's model in a round."""
        query = "SELECT COUNT(*) FROM challenges WHERE sitting = ? AND peer_id = ? AND model = ?"
        return int(self._row(query, sitting, peer_id, model)[0])

    def history(self, peer_id: str, now_s: float) -> tuple[float, int, int]:
        """Unix time of a peer's newest request by its own clock, number of its open and of its answered challenges."""
        query = """SELECT COALESCE(MAX(sent_s), 0), COALESCE(SUM(score IS NULL AND deadline_s >= ?), 0), COUNT(score)
            FROM challenges WHERE peer_id = ?"""
        last_s, still_open, answered = self._row(query, now_s, peer_id)
        return last_s, still_open, answered

    def standings(self, now_s: float, most: int = 200) -> list[Standing]:
        """Rows of the leaderboard, best first; of peers that answered a challenge.

        A challenge counts once all earlier ones of the peer are over too, else a peer would answer its easiest first.
        """
        rows = self._connection.execute(
            f"""SELECT peer_id, total, unanswered, challenges.* FROM challenges JOIN (
                SELECT id, COUNT(*) OVER peer AS total, SUM(score IS NULL) OVER peer AS unanswered,
                    ROW_NUMBER() OVER (PARTITION BY peer_id ORDER BY sent_s DESC) AS age
                FROM challenges LEFT JOIN (
                    SELECT peer_id, MIN(sent_s) AS open_s FROM challenges
                    WHERE score IS NULL AND deadline_s >= ? GROUP BY peer_id
                ) USING (peer_id) WHERE open_s IS NULL OR sent_s < open_s WINDOW peer AS (PARTITION BY peer_id)
            ) USING (id) WHERE age <= {NEWEST} AND total > unanswered ORDER BY peer_id, age""",
            (now_s,),
        )
        peers = [list(found) for _, found in groupby(rows, itemgetter(0))]
        found = [
            _standing(msgspec.convert([row[3:] for row in rows], list[Record]), *rows[0][1:3], peers=len(peers))
            for rows in peers
        ]
        return sorted(found, key=lambda one: (-one.at_least, -one.score, one.peer_id))[:most]

    def _row(self, query: str, *values: object) -> Any:
        return self._connection.execute(query, values).fetchone()


def _standing(newest: Sequence[Record], total: int, unanswered: int, *, peers: int) -> Standing:
    last, score = newest[0], fmean(record.score or 0.0 for record in newest)
    passed: dict[str, list[bool]] = {}
    for record in newest:
        for answer in record.graded:
            passed.setdefault(answer.specialty, []).append(answer.passed)
    # The bound holds for as many questions as each answered challenge has, where the judge's number was changed.
    questions = len(newest) * min((len(record.graded) for record in newest if record.graded), default=0)
    shares = {name: fmean(each) for name, each in sorted(passed.items())}
    bound = lower_bound(score, questions, peers, total)
    return Standing(last.peer_id, last.model, last.arm, last.round, total, unanswered, score, bound, shares)


def lower_bound(share: float, questions: int, peers: int, challenges: int) -> float:
    """Lower bound of the chance of a right answer, which holds for all peers at once and after each challenge.

    The probability of an error is split as 1 / (t (t + 1)) over the challenges t of a peer, and so over the peers as
    they come. No peer gains by stopping at the best time. Each part is Chernoff's bound: the p below `share` at which
    questions * KL(share || p) = log(1 / error) (Hoeffding 1963; it holds for questions of unequal difficulty).

    >>> [round(lower_bound(0.7, n, peers, n // 27), 2) for n, peers in ((27, 1), (27, 60), (270, 60))]
    [0.42, 0.25, 0.53]
    """
    if not questions:
        return 0.0
    nats = math.log(peers * (peers + 1) * challenges * (challenges + 1) / (1 - CONFIDENCE)) / questions
    low, high = 0.0, share
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(share, middle) > nats else (low, middle)
    return low


def _divergence(share: float, p: float) -> float:
    """KL divergence of coins, in nats; p is above 0 and at most `share`."""
    right = share * math.log(share / p) if share else 0.0
    return right + (0.0 if share >= 1 else (1 - share) * math.log((1 - share) / (1 - p)))
