"""A file of questions as a task service: JSONL or Parquet, with `prompt`, `answer` and perhaps `info` per row.

Other columns join `info`, and so reach reward functions by their names. Rows of GSM8K, MATH, MBPP and APPS work as they
are (`dataset_formats`).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal import checker
from shoal.config import TaskConfig
from shoal.errors import TaskError, did_you_mean
from shoal.files import siblings
from shoal.interfaces import Environment
from shoal.tasks.dataset_formats import NothingToScore, canonical
from shoal.tasks.holdout import Epochs, check_rewrite, question_of, rewritten
from shoal.types import Json, Message, Role, Split, Task

RESERVED = ("scorer", "tests", "prompts", "completions")
"""Names that checkers and reward functions use for other values; only `info` may hold the first two."""


class JsonlService(Environment):
    """Draws questions of a file, each epoch in its own order; a share of the questions, chosen by text, is held out.

    A row's `info.scorer` replaces the configured checker for that row. The file is read once, on construction, and held
    in memory.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        """Raises `TaskError` naming the file, line and field that is wrong."""
        check_rewrite(config.name, config.rewrite)
        self.name = config.name
        tasks: list[Task] = []
        questions: list[str] = []
        gaps: list[str] = []
        for number, row in rows_of(Path(config.path or "")):
            where = f"{config.path}:{number}"
            try:
                task, question = _task(config, where, number, row)
            except NothingToScore as error:
                gaps.append(f"{where}: {error}")
                continue
            tasks.append(task)
            questions.append(question)
        total = len(gaps) + len(tasks)
        self.notes = [f"{len(gaps)} of {total} rows are left out, the first is {first}" for first in gaps[:1]]
        """Sentences about rows that are left out."""
        try:
            self.epochs = Epochs(config.name, tasks, questions, config.eval_share, seed)
        except TaskError as error:
            raise TaskError(f"{config.path}: {'; '.join([str(error), *self.notes])}") from None

    @property
    def questions(self) -> Sequence[Task]:
        """All training tasks, in the order of the file."""
        return self.tasks(Split.TRAIN)

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split, in the order of the file."""
        return self.epochs.of[split]

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; each epoch goes through all questions of the split once."""
        return self.epochs.draw(split, index)


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """Number (from 1) and object of each row of a Parquet file, or of each line that is not blank.

    Raises `TaskError`.
    """
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        try:
            yield from enumerate(parquet.read_table(path).to_pylist(), 1)
        except (OSError, pyarrow.ArrowException) as error:
            raise TaskError(f"{path}: expected a Parquet file: {error}") from None
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise TaskError(f"{path}: JSONL file not found{did_you_mean(path.name, siblings(path))}") from None
        raise TaskError(f"{path}: expected a JSONL file in UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise TaskError(f"{path}:{number}: expected a JSON object: {error}") from None
            if not isinstance(row, dict):
                raise TaskError(f"{path}:{number}: expected a JSON object, got {_shown(row)}")
            yield number, row


def _task(config: TaskConfig, where: str, number: int, row: dict[str, Json]) -> tuple[Task, str]:
    """The task of one row, and its question before any rewrite. Raises `NothingToScore` and `TaskError`."""
    try:
        row, usual = canonical(row)
    except NothingToScore:
        raise
    except ValueError as error:
        raise TaskError(f"{where}: {error}") from None
    info = row.get("info") or {}
    if not isinstance(info, dict):
        raise TaskError(f"{where}: info: expected an object, got {_shown(info)}")
    columns = {name: value for name, value in row.items() if name not in ("prompt", "answer", "info")}
    if taken := sorted(columns.keys() & {*info, *RESERVED}):
        raise TaskError(f"{where}: {taken[0]}: expected a column of another name, or once and in info")
    info = {**columns, **info}
    spec = configured = checker.spec_of(config.scorer or usual, f"tasks.{config.name}.scorer")
    if "scorer" in info:
        spec = checker.spec_of(info["scorer"], f"{where}: info.scorer")
    if _reach(spec) - _reach(configured):
        only = f"no function and no judge but that of tasks.{config.name}.scorer"
        raise TaskError(f"{where}: info.scorer: expected {only}, as a row may be a stranger's")
    answer = row.get("answer")
    if answer is not None or checker.needs_truth(spec):
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = json.dumps(answer)
        if not isinstance(answer, str) or not answer.strip():
            raise TaskError(f"{where}: answer: expected text or a number, got {_shown(answer)}")
        answer = answer.strip()
    if checker.needs_tests(spec):
        checker.unit_tests(info.get("tests", []), f"{where}: info.tests")
    asked = _asked(where, row.get("prompt"))
    kept = json.dumps({**info, "scorer": checker.to_json(spec)}, sort_keys=True, default=str)
    task = Task(f"{config.name}/{number}", config.name, _messages(config, asked), answer, kept)
    return task, question_of(asked)


def _reach(spec: checker.Spec) -> set[tuple[str, ...]]:
    """Functions that a checker calls, and URLs that it sends a key to."""
    names = ("path", "url", "key_env")
    judging = (one for one in checker.leaves(spec) if not checker.is_confined(one))
    return {tuple(str(getattr(one, name, "")) for name in names) for one in judging}


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    content: str


def _asked(where: str, value: Json) -> list[Message]:
    """The messages of a row's prompt."""
    if not value or not isinstance(value, str | list):
        raise TaskError(f"{where}: prompt: expected text or a list of messages, got {_shown(value)}")
    try:
        asked = [_Said(Role.USER, value)] if isinstance(value, str) else msgspec.convert(value, list[_Said])
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: prompt: {error}") from None
    if asked[-1].role is Role.ASSISTANT:
        raise TaskError(f"{where}: prompt: expected a last message that is not the assistant's")
    return [Message(one.role, one.content) for one in asked]


def _messages(config: TaskConfig, asked: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as they are asked; a system message of the row replaces the configured one."""
    rewrites = {Role.USER: config.rewrite}
    messages = tuple(Message(one.role, rewritten(one.content, rewrites.get(one.role, ()))) for one in asked)
    own_system = asked[0].role is Role.SYSTEM or not config.system_prompt
    return messages if own_system else (Message(Role.SYSTEM, config.system_prompt), *messages)


def _shown(value: Json) -> str:
    """The value as JSON, short enough for a sentence."""
    text = "nothing" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
