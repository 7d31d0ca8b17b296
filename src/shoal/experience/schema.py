"""The tables of the log, and the values of their rows.

    started    a group was admitted            every group has exactly one row here, and then at most one of
    groups     its rollouts were committed     finished_seq is the order of commit
    ended      it failed or was dropped        with the reason; a group that finished may still be dropped
    consumed   it was trained on               finished_seq is the key: a second use cannot be recorded
    steps      the Version under which one training step consumed, and the Version after it
    trained    fingerprints of the weights after the steps, once the trainer has taken them
    published  checksums of the Versions
    shards     files of the archive, and the last step that each holds
    turns      finished turns of groups without a row in groups or ended; those groups go on after a resume

All else (counts, staleness, waiting groups, groups that a crash interrupted) is derived from these.
A peer's group has the peer in its row of `started`, where own groups have null. It is written whole, in the transaction
of the step that trains it; it passes no gate and never waits.
`after_step` is the last step consumed when a row was written, -1 before the first.
"""

from dataclasses import dataclass

from shoal.staleness import Late, Staleness
from shoal.types import Task

FORMAT = "3"
SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE started(
    started_seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, service TEXT NOT NULL,
    admitted_version INTEGER NOT NULL, after_step INTEGER NOT NULL, peer_id TEXT, message_id TEXT);
CREATE TABLE groups(
    finished_seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, task BLOB NOT NULL,
    admitted_version INTEGER NOT NULL, after_step INTEGER NOT NULL, size INTEGER);
CREATE TABLE rollouts(finished_seq INTEGER NOT NULL, position INTEGER NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX rollouts_of_group ON rollouts(finished_seq, position);
CREATE TABLE ended(
    group_id TEXT PRIMARY KEY, outcome TEXT NOT NULL, reason TEXT NOT NULL, after_step INTEGER NOT NULL);
CREATE TABLE consumed(
    finished_seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, position INTEGER NOT NULL,
    horizon INTEGER NOT NULL, trained_from INTEGER, masked_tokens INTEGER NOT NULL);
CREATE UNIQUE INDEX consumed_in_step ON consumed(step, position);
CREATE TABLE steps(step INTEGER PRIMARY KEY, version INTEGER NOT NULL, version_after INTEGER NOT NULL);
CREATE TABLE trained(step INTEGER NOT NULL, weights TEXT NOT NULL);
CREATE TABLE published(version INTEGER NOT NULL, checksum TEXT NOT NULL);
CREATE TABLE shards(name TEXT PRIMARY KEY, through INTEGER NOT NULL);
"""
SIZES = "ALTER TABLE groups ADD COLUMN size INTEGER"
"""Number of rollouts of a group, null in logs of the same format that lacked it; made in these logs, too."""
TURNS = (
    "CREATE TABLE IF NOT EXISTS turns(group_id TEXT NOT NULL, rollout INTEGER NOT NULL, prompt BLOB NOT NULL, "
    "body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS turns_of_group ON turns(group_id, rollout)",
)
"""Also made in logs of the same format that lack it. Rollout -1 of a group holds its task."""


@dataclass(frozen=True, slots=True)
class RunMeta:
    """Values of a run that an audit needs; a resume must have equal values."""

    max_staleness: int
    late: Late
    groups_per_step: int
    push_every: int
    own_code: str = ""
    """The user's own loss and advantage with the hashes of their files; empty without any."""

    @property
    def staleness(self) -> Staleness:
        """The bound of the run."""
        return Staleness(self.max_staleness, self.late)


META_KEYS = {
    "max_staleness": "asynchrony.max_staleness",
    "late": "async.late",
    "groups_per_step": "train.groups_per_step",
    "push_every": "train.push_every",
    "own_code": "own_code",
}
"""Key of each field of `RunMeta` in the table meta."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A training step in the log."""

    step: int
    version: int
    """Version of the trained weights."""
    version_after: int
    """`version`, or one more when the step ends with a new Version."""


@dataclass(frozen=True, slots=True)
class ConsumedGroup:
    """One group of a step: its choice and its trained part."""

    finished_seq: int
    horizon: int
    """The newest finished_seq among the groups that could have been chosen."""
    trained_from: int | None
    """The oldest Version of a trained token, or None."""
    masked_tokens: int = 0
    """Number of tokens beyond `max_staleness` that the trainer got without an advantage."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A group that was in flight when its process ended, and goes on."""

    group_id: str
    task: Task
    admitted_version: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state of a run at its last end, from its log."""

    last_step: int | None
    """The newest step whose groups are recorded; None before the first."""
    version: int
    """The Version after that step."""
    waiting: int
    """Groups that finished and wait to be consumed; they are offered again."""
    interrupted: int
    """Number of groups in flight without a finished turn when the process ended."""
    begun: tuple[Begun, ...] = ()
    """Groups in flight with finished turns, in the order of their starts; they go on."""

    @property
    def first_step(self) -> int:
        """The next step to train."""
        return 0 if self.last_step is None else self.last_step + 1
