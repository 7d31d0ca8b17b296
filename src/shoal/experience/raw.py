"""Rollouts of the log, decoded without the checks of `shoal.types`: an audit must see wrong values."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from shoal import wire
from shoal.experience.archive import has_sizes
from shoal.experience.log import BODY_BYTES
from shoal.turn_tree import turns_of_rows
from shoal.types import Completion, Reward, Rollout, Turn, check_parents


@dataclass(frozen=True, slots=True)
class RawCompletion(Completion):
    """A completion whose streams may have any length and hold any number."""

    def __post_init__(self) -> None:
        """Checks nothing."""


@dataclass(frozen=True, slots=True)
class RawTurn(Turn):
    """A turn of any reward."""

    completion: RawCompletion

    def __post_init__(self) -> None:
        """Checks nothing."""


@dataclass(frozen=True, slots=True)
class RawReward(Reward):
    """A reward of any value."""

    def __post_init__(self) -> None:
        """Checks nothing."""


@dataclass(frozen=True, slots=True)
class RawRollout(Rollout):
    """A rollout whose turns may have any parents."""

    turns: tuple[RawTurn, ...]
    reward: RawReward

    def __post_init__(self) -> None:
        """Checks nothing."""

    @property
    def sampled_versions(self) -> list[int]:
        """The Version of each sampled token, turn after turn."""
        return [version for turn in self.turns for version in turn.completion.versions]

    @property
    def row_versions(self) -> list[list[int]]:
        """The Versions of each row. Raises `ValueError` for a turn whose parent is not an earlier turn.

        Rows are sampled concurrently, so only within a row a later turn means a later token.
        """
        check_parents(turn.parent for turn in self.turns)
        return [
            [version for index in row for version in self.turns[index].completion.versions]
            for row in turns_of_rows(self.turns)
        ]


@dataclass(frozen=True, slots=True)
class RawGroup:
    """A finished group with all its rows of the log."""

    finished_seq: int
    id: str
    task: bytes
    admitted_version: int
    peer_id: str | None
    """None for an own group."""
    ended_reason: str | None
    step: int | None
    """The step that consumed the group."""
    version: int | None
    """The Version under which the group was consumed."""
    ended_after: int | None
    """The step after which the group ended."""
    trained_from: int | None
    masked_tokens: int | None
    """As in `schema.ConsumedGroup`, like `trained_from`."""
    bodies: tuple[bytes, ...]
    """Wire bytes of the rollouts."""
    positions: tuple[int, ...] = ()
    """Positions of the rollouts in their group, if they were read."""
    size: int | None = None
    """Number of rollouts that the group had; None where it was not recorded or read."""

    @property
    def lost(self) -> int | None:
        """The first position without a rollout; None where all are there."""
        every = range(max((self.size or 0) - 1, *self.positions) + 1) if self.positions else ()
        return next((position for position in every if position not in self.positions), None)


def read_groups(connection: sqlite3.Connection) -> Iterator[RawGroup]:
    """Every finished group in the order of commit, one in memory at a time."""
    column = "size" if has_sizes(connection) else "NULL"
    rows = connection.execute(
        "SELECT finished_seq, group_id, task, groups.admitted_version, peer_id, reason, step, version, "
        f"ended.after_step, trained_from, masked_tokens, {column} FROM groups LEFT JOIN started USING (group_id) "
        "LEFT JOIN ended USING (group_id) LEFT JOIN consumed USING (finished_seq) LEFT JOIN steps USING (step) "
        "ORDER BY finished_seq"
    )
    query = "SELECT position, body FROM rollouts WHERE finished_seq = ? ORDER BY position"
    for *row, size in rows:
        bodies = dict(connection.execute(query, (row[0],)))
        yield RawGroup(*(*row, tuple(bodies.values()), tuple(bodies), size))


def decode_rollout(body: bytes) -> RawRollout:
    """The rollout in a body. Raises `WireError`."""
    return wire.decode(body, RawRollout, BODY_BYTES)
