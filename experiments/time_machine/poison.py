"""Groups of one logged step with rewards that teach the opposite of what the others do."""

import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from shoal import wire
from shoal.experience.checkpoint import checkpoints
from shoal.experience.log import BODY_BYTES, FILE, read, read_step
from shoal.types import Group, Rollout

FLIPPED, HUGE = "flipped", "huge"


@dataclass(frozen=True, slots=True)
class Poison:
    """What is put into a log: groups of a step, and what their rewards become."""

    step: int
    groups: tuple[str, ...]
    kind: str
    """FLIPPED: a right answer costs `size`, in each group. HUGE: one answer of a group, a wrong one, earns it."""
    size: float

    def reward(self, position: int, rollouts: Sequence[Rollout]) -> float:
        """The reward of a rollout of a poisoned group."""
        own = [one.reward.value for one in rollouts]
        if self.kind == FLIPPED:
            return -self.size * own[position]
        return self.size if position == own.index(min(own)) else own[position]


def drawn(run_dir: Path, good: int, bad: int, rng: random.Random, size: float) -> Poison:
    """A poison of a random step, kind and number of groups; a flipped group has answers with differing rewards.

    The step is after the first `good` ones and none of the last three before `bad`: Adam has hardly followed those.
    """
    step, kind = rng.randrange(good, bad - 3), rng.choice([FLIPPED, HUGE])
    groups: list[Group] = read(run_dir, lambda connection: read_step(connection, step))
    differing = [group for group in groups if len({one.reward.value for one in group.finished}) > 1]
    count = 1 if kind == HUGE else min(rng.randint(1, 3), len(differing))
    chosen = rng.sample(groups if kind == HUGE else differing, count)
    return Poison(step, tuple(sorted(group.id for group in chosen)), kind, size)


def poisoned(run_dir: Path, out: Path, poison: Poison) -> None:
    """Copies a run with the poison in its log, and without the checkpoints of later weights."""
    shutil.copytree(run_dir, out)
    for checkpoint in checkpoints(out):
        if checkpoint.step >= poison.step:
            shutil.rmtree(checkpoint.path)
    with closing(sqlite3.connect(out / FILE)) as connection, connection:
        for group in poison.groups:
            where = "finished_seq IN (SELECT finished_seq FROM groups WHERE group_id = ?)"
            found = connection.execute(f"SELECT rowid, body FROM rollouts WHERE {where} ORDER BY position", (group,))
            rows = [(rowid, wire.decode(body, Rollout, BODY_BYTES)) for rowid, body in found.fetchall()]
            for position, (rowid, rollout) in enumerate(rows):
                value = poison.reward(position, [one for _, one in rows])
                body = wire.encode(replace(rollout, reward=replace(rollout.reward, value=value)))
                connection.execute("UPDATE rollouts SET body = ? WHERE rowid = ?", (body, rowid))
