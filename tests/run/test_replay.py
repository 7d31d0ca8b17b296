"""What a run did is computed again from its log, bit for bit; what differs is found."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import shoal
from shoal import wire
from shoal.experience import archive
from shoal.experience.log import BODY_BYTES, FILE, read, reading, weights_of
from shoal.experience.schema import StepRecord
from shoal.run.commands.replay import BEGINNING, Replay
from shoal.types import Rollout
from train_runs import events, finished

STEPS = 50


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A run of fifty steps, three to a Version, of which two checkpoints are left."""
    more = (f"--train.steps={STEPS}", "--train.push_every=3", "--log.keep_steps=10", "--train.minibatches=2")
    more += ("--train.reset_optimizer_at_push=true",)
    return finished(tmp_path_factory.mktemp("replayed"), tiny_model_dir, *more)


def test_every_step_of_a_run_is_taken_again_with_the_same_bits(run: Path) -> None:
    done = shoal("replay", str(run), "--step=1", f"--to={STEPS}", "--json")
    values = json.loads(done.stdout.splitlines()[-1])
    assert (values["steps"], values["differ"], values["unrecorded"]) == (STEPS, [], 0), done.stdout
    assert len(set(values["weights"].values())) > STEPS // 5


def test_a_step_is_taken_again_from_the_nearest_checkpoint(run: Path) -> None:
    done = shoal("replay", str(run), f"--step={STEPS - 1}")
    assert "the same bits; all statistics equal" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 of 1 steps have the same bits as in the run"


def test_a_step_whose_log_was_changed_differs_and_so_do_the_steps_after_it(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    last = STEPS - 1
    with closing(sqlite3.connect(other / FILE)) as connection, connection:
        consumed = "SELECT finished_seq FROM consumed WHERE step = ?"
        for (seq,) in connection.execute(consumed, (last - 1,)).fetchall():  # a group without a signal gets one
            first = "WHERE finished_seq = ? AND position = 0"
            (body,) = connection.execute(f"SELECT body FROM rollouts {first}", (seq,)).fetchone()
            rollout = wire.decode(body, Rollout, BODY_BYTES)
            other_reward = replace(rollout.reward, value=1 - rollout.reward.value)
            changed = wire.encode(replace(rollout, reward=other_reward))
            connection.execute(f"UPDATE rollouts SET body = ? {first}", (changed, seq))
    shutil.rmtree(other / "checkpoints" / f"step-{last}")
    done = shoal("replay", str(other), f"--step={last - 1}", f"--to={last + 1}")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "the same bits" in lines[0]
    assert "DIFFER" in lines[1]
    assert "grad_norm" in lines[1]
    assert "DIFFER" in lines[2]
    assert lines[-1] == "1 of 3 steps have the same bits as in the run"


def test_a_step_that_the_log_lacks_is_refused(run: Path) -> None:
    done = shoal("replay", str(run), "--step=7", "--to=99")
    assert done.returncode == 2
    assert f"whose log has 1 to {STEPS}, got 7 to 99" in done.stderr


def test_weights_of_archived_steps_are_read_from_the_archive(run: Path) -> None:
    with reading(run) as connection:
        assert archive.archived_through(connection) > 5
        assert weights_of(connection, 5) is None
    assert read(run, lambda connection: weights_of(connection, 5)) is not None
    assert "replay_not_exact" not in events(run)


def test_the_kept_state_of_a_step_is_that_after_it(tmp_path: Path) -> None:
    taken: list[int] = []
    states: dict[str, list[int]] = {}

    async def repeat(record: StepRecord, *_: object) -> None:
        taken.append(record.step)

    async def save(directory: Path) -> None:
        states[directory.name] = taken.copy()

    records = {step: StepRecord(step, step, step) for step in range(4)}
    logged: Any = SimpleNamespace(records=records, groups=lambda step: [step])
    steps: Any = SimpleNamespace(repeat=repeat)
    trainer: Any = SimpleNamespace(save=save)
    replay = Replay(logged, steps, trainer, tmp_path, saved={BEGINNING: tmp_path})
    asyncio.run(replay.keep_after(2))
    assert (states, replay.at) == ({"state-2": [0, 1, 2]}, 2)
