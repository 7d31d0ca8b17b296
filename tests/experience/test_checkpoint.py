"""A checkpoint is there whole or not at all."""

import os
import subprocess
import sys

import pytest

from shoal.errors import RunDirError
from shoal.experience import checkpoint


def weights(text):
    def write(directory):
        (directory / "model").mkdir()
        (directory / "model" / "weights").write_text(text)
        (directory / "optimizer").write_text("momenta")

    return write


def save(run_dir, step, write, *, keep=2):
    write(checkpoint.begin(run_dir, step))
    return checkpoint.seal(run_dir, step, keep=keep)


def names(run_dir):
    return sorted(os.listdir(run_dir / "checkpoints"))


def test_what_was_saved_is_found_again(tmp_path):
    assert checkpoint.intact(tmp_path) is None
    saved = save(tmp_path, 25, weights("w"))
    assert checkpoint.intact(tmp_path) == saved
    assert saved.step == 25
    assert (saved.path / "model" / "weights").read_text() == "w"


def test_the_newest_is_by_number_and_only_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 100):
        save(tmp_path, step, weights(str(step)), keep=2)
    assert names(tmp_path) == ["step-10", "step-100"]
    newest = checkpoint.intact(tmp_path)
    assert newest is not None
    assert newest.step == 100


def test_a_checkpoint_being_written_is_not_seen_and_its_remains_are_removed(tmp_path):
    save(tmp_path, 1, weights("1"))
    weights("half")(checkpoint.begin(tmp_path, 2))
    newest = checkpoint.intact(tmp_path)
    assert newest is not None
    assert newest.step == 1
    save(tmp_path, 3, weights("3"))
    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_write_that_fails_leaves_the_one_before(tmp_path):
    save(tmp_path, 1, weights("1"))

    def fail(directory):
        (directory / "weights").write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 2, fail)
    assert [one.step for one in checkpoint.checkpoints(tmp_path)] == [1]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, weights("before"))
    again = save(tmp_path, 5, weights("after"))
    assert (again.path / "model" / "weights").read_text() == "after"
    assert names(tmp_path) == ["step-5"]


def test_a_cut_or_incomplete_copy_is_passed_over(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, weights("weights"), keep=3)
    (tmp_path / "checkpoints" / "step-3" / "model" / "weights").write_text("w")
    (tmp_path / "checkpoints" / "step-2" / "optimizer").unlink()
    (tmp_path / "checkpoints" / "step-4").mkdir()
    assert [one.step for one in checkpoint.checkpoints(tmp_path)] == [1]


def test_one_with_other_bytes_of_the_same_size_is_named_and_the_older_intact_one_is_found(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, weights("weights"))
    (tmp_path / "checkpoints" / "step-2" / "model" / "weights").write_text("weighty")
    told = []
    found = checkpoint.intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 1
    assert [sentence.endswith("step-2/model/weights has other bytes than were saved") for sentence in told] == [True]
    (tmp_path / "checkpoints" / "step-1" / "optimizer").write_text("nothing")
    assert checkpoint.intact(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"optimizer": 7}', '{"optimizer": ["a", "b"]}'])
def test_one_with_a_damaged_list_of_files_is_passed_over(tmp_path, text):
    save(tmp_path, 1, weights("1"))
    (save(tmp_path, 2, weights("2")).path / "files.json").write_text(text)
    assert [one.step for one in checkpoint.checkpoints(tmp_path)] == [1]


def test_an_empty_checkpoint_is_refused(tmp_path):
    checkpoint.begin(tmp_path, 1)
    with pytest.raises(RunDirError, match="nothing was saved"):
        checkpoint.seal(tmp_path, 1)
    assert checkpoint.intact(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(RunDirError, match="cannot be written"):
        checkpoint.begin(tmp_path, 1)


WRITER = """
import sys
from pathlib import Path
from shoal.experience import checkpoint

def write(step):
    def fill(directory):
        for name in "abc":
            (directory / name).write_bytes(step.to_bytes(4, "big") * 5000)
    return fill

step = int(sys.argv[2])
while True:
    step += 1
    write(step)(checkpoint.begin(Path(sys.argv[1]), step))
    checkpoint.seal(Path(sys.argv[1]), step, keep=2)
    print(step, flush=True)
"""


def test_kill_9_while_saving_leaves_a_whole_checkpoint(tmp_path):
    step = 0
    for attempt in range(12):
        child = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(step)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        told = 0
        for _ in range(2 + attempt):
            told = int(child.stdout.readline())
        child.kill()
        told = max([told, *map(int, child.stdout.read().split())])
        child.stdout.close()
        child.wait()
        newest = checkpoint.intact(tmp_path)
        assert newest is not None
        assert newest.step >= told
        assert len(checkpoint.checkpoints(tmp_path)) <= 3
        for name in "abc":
            assert (newest.path / name).read_bytes() == newest.step.to_bytes(4, "big") * 5000
        step = newest.step
