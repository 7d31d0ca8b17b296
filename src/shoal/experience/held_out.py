"""Answers to held-out questions, a file for each evaluation.

held_out/000020.jsonl.gz has the answers after 20 steps, a line each: a `HeldOutAnswer` as JSON. A resumed run that
repeats an evaluation replaces its file.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import RunDirError
from shoal.files import digest_of, replaced
from shoal.types import Message, Reward, Rollout, RolloutStatus, Task

FOLDER = "held_out"
SUFFIX = ".jsonl.gz"
MOST_LINE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """One answer of one evaluation, without its tokens."""

    step: int
    question_id: str
    task: str
    truth: str | None
    purpose: str
    """`sampled` or `greedy`."""
    position: int
    messages: tuple[Message, ...]
    """The whole conversation, question first."""
    asked: int
    """Number of leading messages that are the question."""
    reward: Reward
    status: RolloutStatus
    reason: str
    tokens: int
    question: str = ""
    """Digest of the question with its truth: under other settings its id names another one."""

    @classmethod
    def of(cls, step: int, task: Task, purpose: str, position: int, rollout: Rollout) -> "HeldOutAnswer":
        """Builds the answer that a rollout gave."""
        state = task.receipt if task.answer is None else None  # without a truth, its seed may hold that of a game
        question = msgspec.json.encode((task.messages, task.answer, task.info, state))
        return cls(
            step, task.id, task.service, task.answer, purpose, position, rollout.messages, len(task.messages),
            rollout.reward, rollout.status, rollout.reason, rollout.sampled_tokens, digest_of(question)[:16],
        )  # fmt: skip


def write_answers(run_dir: Path, step: int, answers: Iterable[HeldOutAnswer]) -> None:
    """Writes the answers of the evaluation after `step` steps. Raises `RunDirError`."""
    encode = msgspec.json.Encoder().encode
    path = answers_file(run_dir, step)
    try:
        path.parent.mkdir(exist_ok=True)
        with replaced(path, private=True) as unfinished, gzip.open(unfinished, "wb", compresslevel=3) as file:
            file.writelines(encode(answer) + b"\n" for answer in answers)
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}; free space, then --resume") from error


def answers_file(run_dir: Path, step: int) -> Path:
    """File of the evaluation after `step` steps."""
    return run_dir / FOLDER / f"{step:06}{SUFFIX}"


def answer_files(run_dir: Path) -> Sequence[Path]:
    """Files of all evaluations, in the order of their steps."""
    return sorted((run_dir / FOLDER).glob(f"*{SUFFIX}"))


def read_answers(file: Path) -> Iterator[HeldOutAnswer]:
    """Reads the answers of one evaluation. Raises `RunDirError` for any other file."""
    decoder = msgspec.json.Decoder(HeldOutAnswer)
    try:
        with gzip.open(file, "rb") as lines:
            while line := lines.readline(MOST_LINE_BYTES):
                yield decoder.decode(line)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise RunDirError(f"{file}: expected answers to held-out questions, got: {error}") from error
