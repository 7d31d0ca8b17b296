"""What a judge keeps: one SQLite file.

    sittings    seed and signed statement; the seed stays secret until the sitting is over
    challenges  who asked, when, for what; no questions: they follow from the seed
    marks       one per question of an answered challenge

A challenge that was not answered by its deadline has the score 0: who could leave challenges unanswered could choose.
"""

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

from shoal.errors import RunDirError
from shoal.swarm.judge.condition import Condition, Judged
from shoal.swarm.judge.messages import Challenge, GradedAnswer
from shoal.types import RewardStatus

FILE = "judge.sqlite"
FORMAT = 1
NEWEST = 10
"""Challenges of a peer that its score on the leaderboard is the mean of, whatever it called its models."""
CONFIDENCE = 0.95
"""That no peer on the leaderboard is worse than it says, however many there are (Bonferroni)."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sittings(
    number INTEGER PRIMARY KEY, opens_s REAL NOT NULL, closes_s REAL NOT NULL, reveals_s REAL NOT NULL,
    seed BLOB NOT NULL, statement BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS challenges(
    id TEXT PRIMARY KEY, sitting INTEGER NOT NULL REFERENCES sittings(number), peer_id TEXT NOT NULL,
    model TEXT NOT NULL, arm TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, sent_s REAL NOT NULL,
    deadline_s REAL NOT NULL, ask BLOB NOT NULL, answers BLOB, score REAL, UNIQUE(sitting, peer_id, model, attempt));
CREATE INDEX IF NOT EXISTS challenges_of_peer ON challenges(peer_id, model, sent_s);
CREATE INDEX IF NOT EXISTS newest_of_peer ON challenges(peer_id, sent_s, deadline_s, score, model, arm, round, id);
CREATE TABLE IF NOT EXISTS marks(
    challenge TEXT NOT NULL REFERENCES challenges(id), position INTEGER NOT NULL, specialty TEXT NOT NULL,
    value REAL NOT NULL, status TEXT NOT NULL, passed INTEGER NOT NULL, PRIMARY KEY(challenge, position));
"""
_OVER = "(score IS NOT NULL OR deadline_s < ?)"


@dataclass(frozen=True, slots=True)
class KeptRound:
    """A sitting with its secret."""

    number: int
    opens_s: float
    closes_s: float
    reveals_s: float
    seed: bytes
    statement: bytes
    """Signed."""


@dataclass(frozen=True, slots=True)
class Record:
    """A challenge as it is kept. `score` is None while it is open."""

    id: str
    sitting: int
    peer_id: str
    model: str
    arm: Condition
    round: int
    attempt: int
    sent_s: float
    """When the taker says that it asked; later each time."""
    deadline_s: float
    ask: bytes
    """Signed by the taker; and so are the answers."""
    answers: bytes | None
    score: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """One row of the leaderboard: a peer. Names cost nothing, so another name of a model is no row of its own."""

    peer_id: str
    model: str
    arm: Condition
    round: int
    """Of the newest challenge, as the model and the arm."""
    challenges: int
    unanswered: int
    score: float
    """Mean pass@1 of the newest `NEWEST`."""
    at_least: float
    """What the peer's pass@1 is at least: rows are in this order, so that trying often is no way up."""
    specialties: tuple[tuple[str, float], ...] = ()
    """Share passed of the questions of the newest `NEWEST`."""


class JudgeStore:
    """One connection, used by one thread. Invariant: what is returned by a method was committed."""

    def __init__(self, folder: Path) -> None:
        """Raises `RunDirError`."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(folder / FILE, isolation_level=None)
            self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
            (folder / FILE).chmod(0o600)  # it holds seeds that are still secret
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        except (OSError, sqlite3.DatabaseError) as error:
            raise RunDirError(f"{folder / FILE} cannot be written: {error}") from error
        if version not in (0, FORMAT):
            raise RunDirError(f"{folder / FILE}: expected format {FORMAT}, got {version}")
        self._connection.execute(f"PRAGMA user_version={FORMAT}")

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def put_round(self, sitting: KeptRound) -> None:
        """Keeps a sitting."""
        self._connection.execute(
            "INSERT INTO sittings VALUES(?, ?, ?, ?, ?, ?)",
            (
                sitting.number,
                sitting.opens_s,
                sitting.closes_s,
                sitting.reveals_s,
                sitting.seed,
                sitting.statement,
            ),
        )

    def sitting(self, number: int) -> KeptRound | None:
        """By number."""
        row = self._connection.execute("SELECT * FROM sittings WHERE number = ?", (number,)).fetchone()
        return None if row is None else KeptRound(*row)

    def newest_rounds(self, most: int) -> list[KeptRound]:
        """Newest first; the first may not have opened yet."""
        rows = self._connection.execute("SELECT * FROM sittings ORDER BY number DESC LIMIT ?", (most,))
        return [KeptRound(*row) for row in rows]

    def attempts(self, sitting: int, peer_id: str, model: str) -> int:
        """Challenges that a model of a peer got in a sitting."""
        (count,) = self._connection.execute(
            "SELECT COUNT(*) FROM challenges WHERE sitting = ? AND peer_id = ? AND model = ?", (sitting, peer_id, model)
        ).fetchone()
        return int(count)

    def issue(self, challenge: Challenge, ask: bytes) -> None:
        """Keeps a new challenge with the signed message that asked for it."""
        asked = challenge.ask
        self._connection.execute(
            "INSERT INTO challenges VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
            (
                challenge.id,
                challenge.sitting,
                challenge.peer_id,
                asked.model,
                asked.arm.value,
                asked.round,
                challenge.attempt,
                asked.sent_s,
                challenge.deadline_s,
                ask,
            ),
        )

    def challenge(self, id_: str) -> Record | None:
        """By id."""
        row = self._connection.execute("SELECT * FROM challenges WHERE id = ?", (id_,)).fetchone()
        return None if row is None else _record(row)

    def challenges(self, sitting: int) -> list[Record]:
        """Of one sitting, as they were asked for."""
        rows = self._connection.execute("SELECT * FROM challenges WHERE sitting = ? ORDER BY rowid", (sitting,))
        return [_record(row) for row in rows]

    def open_challenges(self, peer_id: str, now_s: float) -> int:
        """How many of a peer's can still be answered."""
        (count,) = self._connection.execute(
            "SELECT COUNT(*) FROM challenges WHERE peer_id = ? AND score IS NULL AND deadline_s >= ?", (peer_id, now_s)
        ).fetchone()
        return int(count)

    def has_answered(self, peer_id: str) -> bool:
        """Whether a peer ever answered a challenge."""
        row = self._connection.execute(
            "SELECT 1 FROM challenges WHERE peer_id = ? AND score IS NOT NULL LIMIT 1", (peer_id,)
        ).fetchone()
        return row is not None

    def last_asked_s(self, peer_id: str) -> float:
        """What a peer's newest message that was granted says of its time; so none is granted twice."""
        (last,) = self._connection.execute(
            "SELECT COALESCE(MAX(sent_s), 0) FROM challenges WHERE peer_id = ?", (peer_id,)
        ).fetchone()
        return float(last)

    def mark(self, id_: str, answers: bytes, marks: Sequence[GradedAnswer], score: float) -> None:
        """Keeps what became of a challenge; a second time is refused by the primary key of its marks."""
        with self._transaction():
            self._connection.execute("UPDATE challenges SET answers = ?, score = ? WHERE id = ?", (answers, score, id_))
            self._connection.executemany(
                "INSERT INTO marks VALUES(?, ?, ?, ?, ?, ?)",
                [
                    (id_, position, mark.specialty, mark.value, mark.status.value, mark.passed)
                    for position, mark in enumerate(marks)
                ],
            )

    def marks(self, id_: str) -> tuple[GradedAnswer, ...]:
        """Of the answers to a challenge, in order; none of one that was not answered."""
        rows = self._connection.execute(
            "SELECT specialty, value, status FROM marks WHERE challenge = ? ORDER BY position", (id_,)
        )
        return tuple(GradedAnswer(specialty, value, RewardStatus(status)) for specialty, value, status in rows)

    def judged(self, now_s: float) -> list[Judged]:
        """Every challenge that is over, for the comparison of the arms; a node is a peer."""
        rows = self._connection.execute(
            f"SELECT peer_id, arm, round, COALESCE(score, 0) FROM challenges WHERE {_OVER} ORDER BY rowid",
            (now_s,),
        )
        return [Judged(peer_id, Condition(arm), round_, score) for peer_id, arm, round_, score in rows]

    def standings(self, now_s: float, most: int = 200) -> list[Standing]:
        """The leaderboard, best first."""
        rows = self._connection.execute(
            f"""
            WITH over AS (SELECT id, peer_id, model, arm, round, score,
                ROW_NUMBER() OVER (PARTITION BY peer_id ORDER BY sent_s DESC) AS age FROM challenges WHERE {_OVER})
            SELECT peer_id, MAX(CASE age WHEN 1 THEN model END), MAX(CASE age WHEN 1 THEN arm END),
                MAX(CASE age WHEN 1 THEN round END), COUNT(*), SUM(score IS NULL),
                AVG(CASE WHEN age <= {NEWEST} THEN COALESCE(score, 0) END),
                MAX(CASE WHEN age <= {NEWEST} THEN (SELECT COUNT(*) FROM marks WHERE challenge = id) END)
            FROM over GROUP BY peer_id""",
            (now_s,),
        ).fetchall()
        bound = partial(lower_bound, peers=len(rows))
        found = [
            Standing(
                peer_id,
                model,
                Condition(arm),
                round_,
                count,
                unanswered,
                score,
                bound(score, each * min(count, NEWEST)),
            )
            for peer_id, model, arm, round_, count, unanswered, score, each in rows
        ]
        best = sorted(found, key=lambda one: (-one.at_least, -one.score, one.peer_id))[:most]
        return [replace(one, specialties=self._passed(one.peer_id)) for one in best]

    def _passed(self, peer_id: str) -> tuple[tuple[str, float], ...]:
        rows = self._connection.execute(
            "SELECT specialty, AVG(passed) FROM marks WHERE challenge IN "
            "(SELECT id FROM challenges WHERE peer_id = ? ORDER BY sent_s DESC LIMIT ?) "
            "GROUP BY specialty ORDER BY specialty",
            (peer_id, NEWEST),
        )
        return tuple((str(specialty), float(share)) for specialty, share in rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with closing(self._connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
            cursor.execute("COMMIT")


def lower_bound(share: float, questions: int, peers: int) -> float:
    """What a share of so many right answers says at least of the answerer, who is the best of so many (Wilson, 1927).

    >>> [round(lower_bound(0.7, n, peers), 2) for n, peers in ((27, 1), (27, 60), (270, 60))]
    [0.54, 0.4, 0.61]
    """
    if not questions:
        return 0.0
    z2 = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / max(peers, 1)) ** 2
    spread = math.sqrt(z2 * share * (1 - share) / questions + z2 * z2 / (4 * questions**2))
    return max(0.0, (share + z2 / (2 * questions) - spread) / (1 + z2 / questions))


def _record(row: Sequence[object]) -> Record:
    values = dict(zip(Record.__dataclass_fields__, row, strict=True))
    values["arm"] = Condition(str(values["arm"]))
    return Record(**values)  # type: ignore[arg-type]  # columns of the table above
