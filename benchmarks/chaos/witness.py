"""A second judge beside `shoal audit`, with code of its own: it remembers what it saw and compares.

It reads log.sqlite and the files of the archive itself, decodes rollouts without a type, and holds the run to what
the log said before each fault: the audit sees one state of a log, the witness its whole life.
"""

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import msgspec

Row: TypeAlias = tuple[object, ...]
TABLES = {
    "started": ("group_id", "peer_id", "message_id"),
    "groups": ("group_id", "finished_seq"),
    "ended": ("group_id",),
    "consumed": ("finished_seq", "step", "position", "trained_from", "masked_tokens"),
    "steps": ("step", "version", "version_after"),
}
WAIT_S = 30.0


@dataclass(slots=True)
class Witness:
    """What was seen of one run, and what of it was broken since: sentences."""

    late: str
    max_staleness: int
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    _started: set[str] = field(default_factory=set)
    _peers: dict[str, Row] = field(
        default_factory=dict
    )  # whose a group is that is not the run's own, and which of theirs
    _groups: dict[int, str] = field(default_factory=dict)  # ids, by finished_seq
    _digests: dict[int, bytes] = field(default_factory=dict)  # of rollouts, by finished_seq
    _steps: dict[int, Row] = field(default_factory=dict)
    _uses: dict[int, list[int]] = field(default_factory=dict)  # finished_seq in order, by step

    def look(self, run_dir: Path) -> None:
        """Compares a run's log with what it was, and remembers what it is."""
        path = run_dir / "log.sqlite"
        if not path.exists():
            if self._started:
                self.lost.append("the whole log")
            return
        metrics = run_dir / "metrics.jsonl"
        told = metrics.read_bytes() if metrics.exists() else b""  # first: each step is in the log before it is told
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=WAIT_S)) as connection:
            connection.execute("BEGIN")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'shards'").fetchone():
                if self._started:
                    self.lost.append("the tables of the log")
                return
            shards = [run_dir / "archive" / name for (name,) in connection.execute("SELECT name FROM shards")]
            tables = {name: list(_rows(connection, shards, name, columns)) for name, columns in TABLES.items()}
            bodies: list[Row] = connection.execute("SELECT finished_seq, position, body FROM rollouts").fetchall()
        self._compare(tables)
        self._read_bodies([*bodies, *(_archived_bodies(shards))], tables)
        self._count_metrics(told)

    def _compare(self, tables: dict[str, list[Row]]) -> None:
        started = [str(group_id) for group_id, *_ in tables["started"]]
        self._peers = {str(one): (peer, message) for one, peer, message in tables["started"] if peer is not None}
        groups = {_int(seq): str(group_id) for group_id, seq in tables["groups"]}
        steps = {_int(row[0]): row for row in tables["steps"]}
        uses: dict[int, list[int]] = {step: [] for step in steps}
        for seq, step, *_ in sorted(tables["consumed"], key=lambda row: (_int(row[1]), _int(row[2]))):
            uses.setdefault(_int(step), []).append(_int(seq))
        self.lost += [f"start of group {one}" for one in self._started - set(started)]
        self.lost += [f"group {one}" for seq, one in self._groups.items() if groups.get(seq) != one]
        self.lost += [f"step {one}" for one, row in self._steps.items() if steps.get(one) != row]
        self.lost += [f"groups of step {one}" for one, seqs in self._uses.items() if uses.get(one) != seqs]
        self.lost += [f"step {one}, though later ones are there" for one in set(range(len(steps))) - set(steps)]
        begun = set(started)
        ended = {str(group_id) for (group_id,) in tables["ended"]}
        self.lost += [f"start of group {one}" for one in {*groups.values(), *ended} - begun]
        used = Counter(chain.from_iterable(uses.values()))
        self.lost += [f"group {seq}, which a step trained" for seq in used if seq not in groups]
        self.doubled += [f"group {seq} was trained {times} times" for seq, times in used.items() if times > 1]
        ids = Counter(groups[seq] for seq in used if seq in groups)
        self.doubled += [f"group {one} was trained {times} times" for one, times in ids.items() if times > 1]
        offers = Counter(self._peers[one] for one in ids if one in self._peers)
        self.doubled += [
            f"offer {message} of {peer} was trained {n} times" for (peer, message), n in offers.items() if n > 1
        ]
        self.doubled += [f"group {one} was trained though it ended" for one in ids if one in ended]
        self.doubled += [f"group {one} started {n} times" for one, n in Counter(started).items() if n > 1]
        self._started, self._groups, self._steps, self._uses = begun, groups, steps, uses

    def _read_bodies(self, bodies: list[Row], tables: dict[str, list[Row]]) -> None:
        """Rollouts stay byte for byte what they were; the tokens of those that were trained are young enough."""
        of_group: dict[int, list[tuple[int, bytes]]] = {}
        for seq, position, body in bodies:
            assert isinstance(body, bytes)
            of_group.setdefault(_int(seq), []).append((_int(position), body))
        versions = {_int(step): _int(version) for step, version, _ in tables["steps"]}
        consumed = {_int(seq): (_int(step), start, _int(masked)) for seq, step, _, start, masked in tables["consumed"]}
        for seq, group_id in self._groups.items():
            ordered = [body for _, body in sorted(of_group.get(seq, []))]
            digest = hashlib.sha256(b"".join(ordered)).digest()
            if self._digests.setdefault(seq, digest) != digest:
                self.lost.append(f"bytes of group {group_id}")
                continue
            if seq not in consumed or group_id in self._peers:
                continue
            step, trained_from, masked = consumed[seq]
            drawn = [version for body in ordered for version in _versions(body)]
            if self.late == "mask_tokens":  # the log says how many tokens taught nothing, and from where others did
                kept = [version for body in ordered if not _failed(body) for version in _versions(body)]
                late = sum(version < versions.get(step, 0) - self.max_staleness for version in kept)
                if masked < late:
                    self.stale.append(f"group {group_id}: {late} tokens were late, and {masked} of them masked")
                drawn = [] if trained_from is None else [_int(trained_from)]
            if drawn and step in versions and not 0 <= versions[step] - min(drawn) <= self.max_staleness:
                self.stale.append(f"group {group_id}: version {min(drawn)} was trained under {versions[step]}")

    def _count_metrics(self, told: bytes) -> None:
        """The training loop takes each step once: replays are not told."""
        steps: Counter[object] = Counter()
        for line in told.splitlines():
            try:
                record = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # torn by a kill
            if record.get("kind") == "step":
                steps[record["step"]] += 1
        self.doubled += [f"step {step} was taken {times} times" for step, times in steps.items() if times > 1]
        unknown = sorted(_int(step) for step in steps if _int(step) - 1 not in self._steps)
        self.lost += [f"step {step - 1}, which metrics.jsonl tells of" for step in unknown]


def _rows(connection: sqlite3.Connection, shards: list[Path], table: str, columns: tuple[str, ...]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    yield from connection.execute(f"SELECT {', '.join(columns)} FROM {table}")
    for shard in shards:
        kept = pq.read_table(shard, columns=[*columns, "kind"], filters=[("kind", "=", table)]).to_pydict()
        yield from zip(*(kept[name] for name in columns), strict=True)


def _archived_bodies(shards: list[Path]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    columns = ["finished_seq", "position", "body"]
    for shard in shards:
        kept = pq.read_table(shard, columns=[*columns, "kind"], filters=[("kind", "=", "rollouts")]).to_pydict()
        yield from zip(*(kept[name] for name in columns), strict=True)


def _versions(body: bytes) -> Iterator[int]:
    """Of every drawn token, wherever it is in the value: the first byte says the format."""
    rest: list[object] = [msgspec.msgpack.decode(body[1:])]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield from value.get("versions", ())
            rest += value.values()
        elif isinstance(value, list) and value and not isinstance(value[0], int | float):
            rest += value


def _failed(body: bytes) -> bool:
    value = msgspec.msgpack.decode(body[1:])
    return isinstance(value, dict) and value.get("status") == "failed"


def _int(value: object) -> int:
    assert isinstance(value, int), value
    return value
