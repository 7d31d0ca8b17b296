"""What a run did is computed again from its log, bit for bit; what differs is found."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from command import shoal
from shoal.experience import archive
from shoal.experience.log import FILE, read, reading, weights_of
from train_runs import events, start

STEPS = 50


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A run of fifty steps, three to a Version, of which two checkpoints are left."""
    folder = tmp_path_factory.mktemp("replayed")
    more = (f"--train.steps={STEPS}", "--train.push_every=3", "--log.keep_steps=10", "--train.minibatches=2")
    process = start(folder, tiny_model_dir, *more, "--train.reset_optimizer_at_push=true")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return folder / "run"


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
        for (seq,) in connection.execute(consumed, (last - 1,)).fetchall():  # all answers become the first
            bodies = [
                body for (body,) in connection.execute("SELECT body FROM rollouts WHERE finished_seq = ?", (seq,))
            ]
            for at in range(len(bodies)):
                where = "WHERE finished_seq = ? AND position = ?"
                connection.execute(f"UPDATE rollouts SET body = ? {where}", (bodies[0], seq, at))
    shutil.rmtree(other / "checkpoints" / f"step-{last}")
    done = shoal("replay", str(other), f"--step={last - 1}", f"--to={last + 1}")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "the same bits" in lines[0]
    assert "DIFFER" in lines[1]
    assert "loss" in lines[1]
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
