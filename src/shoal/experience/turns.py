"""Finished turns of groups in flight: logged as they finish, and given again to a resumed run.

Source: the fragments of GLM-5 (arXiv 2602.15763, section 4.1). A turn is found by its rollout's index, its prompt's
tokens and its sampling, so an agent that asks something else after a resume gets new answers.
"""

import hashlib
import sqlite3
from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from shoal import wire
from shoal.experience.log import BODY_BYTES
from shoal.types import Completion, Sampling, Task

Key: TypeAlias = tuple[int, bytes]
"""Index of the rollout in its group, and digest of what was asked."""


@dataclass(slots=True)
class GroupTurns:
    """Turns of a group that an earlier process left, and the way to log further ones."""

    group_id: str
    task: Task
    running: Container[str]
    """Groups that run now; a turn after the end of its group is not logged."""
    _post: Callable[[Callable[[sqlite3.Connection], object]], None]
    left: defaultdict[Key, deque[Completion]] = field(default_factory=lambda: defaultdict(deque))
    is_logged: bool = False
    """Whether the log has the group's task, without which no turn is found."""

    def of(self, rollout: int) -> "RolloutTurns":
        """The turns of one rollout."""
        return RolloutTurns(self, rollout)

    def insert(self, rollout: int, prompt: bytes, body: bytes) -> None:
        """Has a row logged, after that of the task."""
        rows = [(self.group_id, rollout, prompt, body)]
        if not self.is_logged:
            self.is_logged = True
            rows.insert(0, (self.group_id, -1, b"", wire.encode(self.task)))
        self.change("INSERT INTO turns VALUES (?, ?, ?, ?)", rows)

    def change(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Has a statement run for each of its rows, unless the group has ended."""
        if self.group_id in self.running:
            self._post(lambda c: c.executemany(statement, rows))


@dataclass(frozen=True, slots=True)
class RolloutTurns:
    """Implements `interfaces.FinishedTurns` in the log of the run."""

    group: GroupTurns
    rollout: int

    def take(self, prompt_ids: Sequence[int], sampling: Sampling, ends: Sequence[object] = ()) -> Completion | None:
        """Implements `FinishedTurns`."""
        left = self.group.left.get((self.rollout, _digest(prompt_ids, sampling, ends)))
        return left.popleft() if left else None

    def keep(
        self, prompt_ids: Sequence[int], sampling: Sampling, completion: Completion, ends: Sequence[object] = ()
    ) -> None:
        """Implements `FinishedTurns`."""
        self.group.insert(self.rollout, _digest(prompt_ids, sampling, ends), wire.encode(completion))

    def forget(self) -> None:
        """Implements `FinishedTurns`."""
        for key in [key for key in self.group.left if key[0] == self.rollout]:
            del self.group.left[key]
        self.group.change("DELETE FROM turns WHERE group_id = ? AND rollout = ?", [(self.group.group_id, self.rollout)])


def read_left(connection: sqlite3.Connection, turns: GroupTurns) -> GroupTurns:
    """Fills `turns` with those of its group in the log, in the order of their ends."""
    turns.is_logged = True
    rows = connection.execute(
        "SELECT rollout, prompt, body FROM turns WHERE group_id = ? AND rollout >= 0 ORDER BY rowid", (turns.group_id,)
    )
    for rollout, prompt, body in rows:
        turns.left[rollout, prompt].append(wire.decode(body, Completion, BODY_BYTES))
    return turns


def _digest(prompt_ids: Sequence[int], sampling: Sampling, ends: Sequence[object]) -> bytes:
    asked = wire.encode((prompt_ids, replace(sampling, seed=None), ends))
    return hashlib.blake2b(asked, digest_size=16).digest()
