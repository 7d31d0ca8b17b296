"""Held-out answers are kept, each evaluation in a file of its own."""

from pathlib import Path

import pytest

from shoal.errors import RunDirError
from shoal.experience.held_out import HeldOutAnswer, answer_files, read_answers, write_answers
from shoal.types import Message, Reward, Role, Rollout, Task


def answer(step: int, number: int = 0) -> HeldOutAnswer:
    question = (Message(Role.USER, f"question {number}"),)
    rollout = Rollout(
        "r", (*question, Message(Role.ASSISTANT, "\u202e answer\x00")), (), Reward(0.5, parts=(("a", 1.0),))
    )
    return HeldOutAnswer.of(step, Task(f"t{number}", "sums", question, "truth"), "sampled", 0, rollout)


def test_answers_are_read_as_they_were_written_and_a_second_evaluation_replaces_the_first(tmp_path: Path) -> None:
    for step, count in ((20, 1), (0, 2), (20, 3)):
        write_answers(tmp_path, step, [answer(step, number) for number in range(count)])
    assert [file.name for file in answer_files(tmp_path)] == ["000000.jsonl.gz", "000020.jsonl.gz"]
    read = list(read_answers(answer_files(tmp_path)[1]))
    assert read == [answer(20, number) for number in range(3)]
    assert (read[0].asked, read[0].task, read[0].truth) == (1, "sums", "truth")


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes | None) -> None:
    write_answers(tmp_path, 1, [answer(1)])
    (file,) = answer_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-12] if damage is None else damage)
    if damage == b"":
        assert list(read_answers(file)) == []  # an empty file is an empty archive to gzip
        return
    with pytest.raises(RunDirError, match=r"000001\.jsonl\.gz"):
        list(read_answers(file))
