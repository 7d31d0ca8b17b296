"""Rollouts of the log, decoded without the checks of `shoal.types`: an audit must see wrong values."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from shoal import wire
from shoal.errors import WireError
from shoal.experience.log import BODY_BYTES
from shoal.turn_tree import turns_of_rows
from shoal.types import Message, Receipt, check_parents


class RawCompletion(msgspec.Struct):
    """See `types.Completion`; the streams may have any length and hold anything."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


class RawTurn(msgspec.Struct):
    """See `types.Turn`."""

    rendered_ids: list[int]
    completion: RawCompletion
    reward: float = 0.0
    parent: int | None = None


class RawReward(msgspec.Struct):
    """See `types.Reward`."""

    value: float
    status: str
    parts: list[tuple[str, float]] = []
    evidence: str = ""


class RawRollout(msgspec.Struct):
    """See `types.Rollout`."""

    id: str
    messages: list[Message]
    turns: list[RawTurn]
    reward: RawReward
    status: str
    reason: str

    @property
    def sampled_versions(self) -> list[int]:
        """The Version of each sampled token, turn after turn."""
        return [version for turn in self.turns for version in turn.completion.versions]

    @property
    def row_versions(self) -> list[list[int]]:
        """The Versions of each row. Raises `ValueError` for a turn whose parent is no earlier one.

        Rows are sampled side by side, so only within a row a later turn means a later token.
        """
        check_parents(turn.parent for turn in self.turns)
        return [
            [version for index in row for version in self.turns[index].completion.versions]
            for row in turns_of_rows(self.turns)
        ]


class RawTask(msgspec.Struct):
    """See `types.Task`."""

    service: str
    receipt: Receipt | None = None
    answer: str | None = None


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
    ended_after: int | None
    """The step after which the group ended."""
    step: int | None
    """The step that consumed the group."""
    version: int | None
    """The Version under which the group was consumed."""
    trained_from: int | None
    masked_tokens: int | None
    """As in `log.ConsumedGroup`, like `trained_from`."""
    bodies: tuple[bytes, ...]
    """Wire bytes of the rollouts."""


def read_groups(connection: sqlite3.Connection) -> Iterator[RawGroup]:
    """Every finished group in the order of commit, one in memory at a time."""
    rows = connection.execute(
        "SELECT finished_seq, group_id, task, groups.admitted_version, peer_id, reason, ended.after_step, step, "
        "version, trained_from, masked_tokens FROM groups LEFT JOIN started USING (group_id) "
        "LEFT JOIN ended USING (group_id) LEFT JOIN consumed USING (finished_seq) LEFT JOIN steps USING (step) "
        "ORDER BY finished_seq"
    )
    bodies = "SELECT body FROM rollouts WHERE finished_seq = ? ORDER BY position"
    for row in rows:
        yield RawGroup(*(*row, tuple(body for (body,) in connection.execute(bodies, (row[0],)))))


def rollout_id(body: bytes, default: str) -> str:
    """The id in a body that may be no rollout."""
    try:
        return wire.decode(body, _Named, BODY_BYTES).id
    except WireError:
        return default


class _Named(msgspec.Struct):
    id: str
