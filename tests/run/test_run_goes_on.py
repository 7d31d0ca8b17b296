"""A killed run goes on from the finished turns of its groups in flight."""

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from shoal import wire
from shoal.experience.audit import audit
from shoal.experience.log import read, read_step
from shoal.types import Completion, Group
from train_runs import start

TURNS = 3
AGENT = """
import asyncio
from pathlib import Path


async def talks(task, client):
    messages = [{"role": one.role.value, "content": one.content} for one in task.messages]
    for turn in range(3):
        while turn == 2 and task.id.count("/") == 2 and not Path("go").exists():  # a slow tool
            await asyncio.sleep(0.05)
        answer = (await client.chat.completions.create(model="default", messages=messages)).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"go on {turn}"}]
    return float(len(answer) % 2)
"""


def finished_turns(log: Path) -> dict[str, dict[int, list[Completion]]]:
    """Logged turns of groups in flight: group -> rollout -> completions in the order of their ends."""
    with closing(sqlite3.connect(f"{log.as_uri()}?mode=ro", uri=True)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'turns'").fetchone():
            return {}  # the run has just made its log
        rows = connection.execute(
            "SELECT group_id, rollout, body FROM turns WHERE rollout >= 0 ORDER BY rowid"
        ).fetchall()
    found: dict[str, dict[int, list[Completion]]] = {}
    for group, rollout, body in rows:
        found.setdefault(group, {}).setdefault(rollout, []).append(wire.decode(body, Completion, len(body)))
    return found


def test_a_killed_run_loses_no_finished_turn(tmp_path: Path, tiny_model_dir: Path) -> None:
    log, agent = tmp_path / "run" / "log.sqlite", '--tasks.0.agent={run = "talks.py:talks"}'
    (tmp_path / "talks.py").write_text(AGENT)
    first = start(tmp_path, tiny_model_dir, agent)
    deadline = time.monotonic() + 120
    before: dict[str, dict[int, list[Completion]]] = {}
    while not any(len(turns) == 4 and all(len(one) == 2 for one in turns.values()) for turns in before.values()):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline, before
        time.sleep(0.05)
        before = finished_turns(log) if log.exists() and log.stat().st_size and os.path.exists(f"{log}-wal") else {}
    first.kill()
    first.communicate()
    before = finished_turns(log)
    (tmp_path / "go").touch()
    again = start(tmp_path, tiny_model_dir, agent, "--train.steps=4", "--resume")
    _, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()

    def trained(connection: sqlite3.Connection) -> dict[str, Group]:
        return {group.id: group for step in range(4) for group in read_step(connection, step)}

    groups = read(tmp_path / "run", trained)
    went_on = before.keys() & groups.keys()
    assert went_on, (before.keys(), groups.keys())
    for name in went_on:
        for rollout, turns in before[name].items():
            of_rollout = groups[name].rollouts[rollout]
            assert [turn.completion for turn in of_rollout.turns[: len(turns)]] == turns
            assert len(of_rollout.turns) == TURNS
    assert not finished_turns(log).keys() & groups.keys()
