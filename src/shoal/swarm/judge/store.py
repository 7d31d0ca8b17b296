"""The judge's store is one SQLite file.

    sittings    seed and signed statement of a round; the seed stays secret until the round is over
    challenges  taker, time and model of a request; no questions: they follow from the seed
    marks       one graded answer per question of an answered challenge

A challenge unanswered at its deadline has the score 0, so takers cannot choose by leaving challenges unanswered.
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
"""Challenges of a peer in its score on the leaderboard, under any model name."""
CONFIDENCE = 0.95
"""Probability that no peer on the leaderboard is worse than its row says, for any number of peers (Bonferroni)."""
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
    """A round with its secret seed."""

    number: int
    opens_s: float
    closes_s: float
    reveals_s: float
    seed: bytes
    statement: bytes
    """Signed `Round`."""


@dataclass(frozen=True, slots=True)
class Record:
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
    answers: bytes | None
    score: float | None


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
    """Lower bound of the peer's pass@1; rows follow it, so many attempts are no way up."""
    specialties: tuple[tuple[str, float], ...] = ()
    """Share of right answers among the newest `NEWEST` challenges."""


class JudgeStore:
    """Store of a judge: one connection, used by one thread. Invariant: every returned value was committed."""

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

    def put_round(self, round_: KeptRound) -> None:
        """Stores a round."""
        self._connection.execute(
            "INSERT INTO sittings VALUES(?, ?, ?, ?, ?, ?)",
            (
                round_.number,
                round_.opens_s,
                round_.closes_s,
                round_.reveals_s,
                round_.seed,
                round_.statement,
            ),
        )

    def kept_round(self, number: int) -> KeptRound | None:
        """Finds a round by number."""
        row = self._connection.execute("SELECT * FROM sittings WHERE number = ?", (number,)).fetchone()
        return None if row is None else KeptRound(*row)

    def newest_rounds(self, most: int) -> list[KeptRound]:
        """Newest rounds first; the first may not have opened yet."""
        rows = self._connection.execute("SELECT * FROM sittings ORDER BY number DESC LIMIT ?", (most,))
        return [KeptRound(*row) for row in rows]

    def attempts(self, round_: int, peer_id: str, model: str) -> int:
        """Number of challenges issued to a peer's model in a round."""
        (count,) = self._connection.execute(
            "SELECT COUNT(*) FROM challenges WHERE sitting = ? AND peer_id = ? AND model = ?", (round_, peer_id, model)
        ).fetchone()
        return int(count)

    def issue(self, challenge: Challenge, ask: bytes) -> None:
        """Stores a new challenge with its signed request."""
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
        """Finds a challenge by id."""
        row = self._connection.execute("SELECT * FROM challenges WHERE id = ?", (id_,)).fetchone()
        return None if row is None else _record(row)

    def challenges(self, round_: int) -> list[Record]:
        """Challenges of one round, in order of request."""
        rows = self._connection.execute("SELECT * FROM challenges WHERE sitting = ? ORDER BY rowid", (round_,))
        return [_record(row) for row in rows]

    def open_challenges(self, peer_id: str, now_s: float) -> int:
        """Number of a peer's challenges that can still be answered."""
        (count,) = self._connection.execute(
            "SELECT COUNT(*) FROM challenges WHERE peer_id = ? AND score IS NULL AND deadline_s >= ?", (peer_id, now_s)
        ).fetchone()
        return int(count)

    def has_answered(self, peer_id: str) -> bool:
        """Tells whether a peer ever answered a challenge."""
        row = self._connection.execute(
            "SELECT 1 FROM challenges WHERE peer_id = ? AND score IS NOT NULL LIMIT 1", (peer_id,)
        ).fetchone()
        return row is not None

    def last_asked_s(self, peer_id: str) -> float:
        """Unix time of a peer's newest granted request by its own clock; no request is granted twice."""
        (last,) = self._connection.execute(
            "SELECT COALESCE(MAX(sent_s), 0) FROM challenges WHERE peer_id = ?", (peer_id,)
        ).fetchone()
        return float(last)

    def keep_grades(self, id_: str, answers: bytes, graded: Sequence[GradedAnswer], score: float) -> None:
        """Stores answers and grades of a challenge; the primary key of the grades refuses a second time."""
        with self._transaction():
            self._connection.execute("UPDATE challenges SET answers = ?, score = ? WHERE id = ?", (answers, score, id_))
            self._connection.executemany(
                "INSERT INTO marks VALUES(?, ?, ?, ?, ?, ?)",
                [
                    (id_, position, answer.specialty, answer.value, answer.status.value, answer.passed)
                    for position, answer in enumerate(graded)
                ],
            )

    def graded_answers(self, id_: str) -> tuple[GradedAnswer, ...]:
        """Graded answers of a challenge, in order; empty for an unanswered challenge."""
        rows = self._connection.execute(
            "SELECT specialty, value, status FROM marks WHERE challenge = ? ORDER BY position", (id_,)
        )
        return tuple(GradedAnswer(specialty, value, RewardStatus(status)) for specialty, value, status in rows)

    def judged(self, now_s: float) -> list[Judged]:
        """Scores of all finished challenges, for the comparison; a node is a peer."""
        rows = self._connection.execute(
            f"SELECT peer_id, arm, round, COALESCE(score, 0) FROM challenges WHERE {_OVER} ORDER BY rowid",
            (now_s,),
        )
        return [Judged(peer_id, Condition(arm), round_, score) for peer_id, arm, round_, score in rows]

    def standings(self, now_s: float, most: int = 200) -> list[Standing]:
        """Rows of the leaderboard, best first."""
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
    """Lower bound of a share of right answers, for the best of several peers (Wilson, 1927).

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
