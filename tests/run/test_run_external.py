"""What a step makes of peers' groups beside its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.config import parse
from shoal.experience.buffer import Buffer
from shoal.run.policy import Policy
from shoal.run.run_dir import run_meta
from shoal.trainer.packing import even_slices
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Origin,
    Reward,
    Role,
    Rollout,
    Task,
    Turn,
)

OWN, THEIRS = 3, 7
"""Tokens of which answers are made."""


def group(id_: str, token: int) -> Group:
    turn = Turn((1,), Completion((token,), (-1.0,), (0,), FinishReason.STOP))
    rollouts = tuple(Rollout(f"{id_}#{r}", (), (turn,), Reward(r)) for r in (0.0, 1.0))
    origin = Origin("reef", id_) if token == THEIRS else None
    return Group(id_, Task("t", "gcd", (Message(Role.USER, "?"),)), rollouts, 0, origin)


async def test_every_update_of_a_step_trains_on_own_groups_and_on_peers(tmp_path: Path) -> None:
    settings = {"train": {"groups_per_step": 4, "minibatches": 2}, "swarm": {"credit": "group_likely"}}
    config = parse({"run_dir": str(tmp_path), "tasks": [{"name": "gcd"}], **settings})

    buffer = Buffer.open(tmp_path, run_meta(config), max_running=1)
    prepared: Any = SimpleNamespace(config=config)
    names = ("engine", "trainer", "runner", "scorer", "store", "engines", "teacher", "draw")
    nothing: dict[str, Any] = dict.fromkeys(names)
    policy = Policy(config, prepared=prepared, buffer=buffer, **nothing)
    own = [group(f"own{i}", OWN) for i in range(4)]
    built = await policy.rows([*own, *(group(f"theirs{i}", THEIRS) for i in range(4))], policy.version)
    rows = list(built.of_group.values())
    for part in even_slices(len(rows), 2):
        tokens = [row.tokens[-1] for i in part for row in rows[i]]
        assert tokens.count(OWN) == tokens.count(THEIRS) == 4
    worse = {row.advantages[-1] for group_rows in rows for row in group_rows if row.tokens[-1] == THEIRS}
    assert min(worse) == 0.0 < max(worse)  # credit goes to the groups that are peers', wherever they are
    await buffer.close()
