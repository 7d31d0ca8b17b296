"""Rollouts as people read them, with a glance of each, and held-out questions across time with their answers.

At most `MOST_EVALUATIONS` evaluations of a run are read, including the first and the newest.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from shoal import wire
from shoal.errors import WireError
from shoal.experience.held_out import HeldOutAnswer, answer_files, read_answers
from shoal.experience.log import BODY_BYTES
from shoal.experience.raw import RawGroup, RawRollout, decode_rollout
from shoal.model.answer import parted
from shoal.observe.view.index import Row
from shoal.types import Message, RewardStatus, Role, Task, ToolCall

GLANCE_CHARACTERS = 160
LEAST_SHARED = 24
"""Questions' shared beginnings of at least this many characters are left out."""
MOST_CHARACTERS = 20_000
"""Longer texts are shown without their middle."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message."""

    role: str
    thought: str
    text: str
    calls: Sequence[ToolCall]
    answers_call: str
    is_output: bool = False
    """Whether it is what a command or a tool wrote, shown as it is."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One rollout of a group; `broken` says why it cannot be read."""

    position: int
    rollout: RawRollout | None
    said: Sequence[Said] = ()
    versions: Sequence[int] = ()
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Glance:
    """One line of a list: a row, its texts cut to a line, and how many rows are equal to it."""

    row: Row
    question: str
    answer: str
    truth: str
    count: int


def asked(group: RawGroup) -> Task | None:
    """The question of a group; None when it cannot be read."""
    try:
        return wire.decode(group.task, Task, BODY_BYTES)
    except WireError:
        return None


def shown(position: int, body: bytes, question: Sequence[Message]) -> Shown:
    """One rollout, without the question that its group shares."""
    try:
        one = decode_rollout(body)
    except WireError as error:
        return Shown(position, None, broken=str(error))
    new = one.messages[len(question) :] if tuple(question) == one.messages[: len(question)] else one.messages
    each = [said(message, last) for last, message in zip((None, *new), new, strict=False)]
    return Shown(position, one, each, one.sampled_versions)


def said(message: Message, before: Message | None = None) -> Said:
    """One message, with thought and answer apart; what follows a block of an answer's code is its output."""
    thought, text = message.reasoning, message.content
    if message.role is Role.ASSISTANT and not thought and "</think>" in text:
        whole = parted(text)
        thought, text = whole.thought, whole.answer
    follows_code = before is not None and before.role is Role.ASSISTANT and "```" in before.content
    is_output = message.role is Role.TOOL or (message.role is Role.USER and follows_code)
    calls, answers = message.tool_calls, message.tool_call_id
    return Said(message.role.value, shortened(thought), shortened(text), calls, answers, is_output)


def glances(rows: Sequence[Row]) -> list[Glance]:
    """Rows as lines of a list: equal answers are merged, and a task's questions lose their shared beginning."""
    alike = defaultdict[tuple[object, ...], list[tuple[Row, tuple[str, str, str]]]](list)
    asked = defaultdict[str, set[str]](set)
    for row in rows:
        texts = _texts(row)
        asked[row.task].add(texts[0])
        alike[row.task, row.step, row.status, row.reward, row.reason, texts].append((row, texts))
    shared = {task: shared_beginning(questions) for task, questions in asked.items()}
    found = []
    for same in alike.values():
        row, (question, answer, truth) = same[0]
        cut = shared[row.task]
        line = f"...{glance(question[cut:])}" if cut else glance(question)
        found.append(Glance(row, line, glance(answer), glance(truth), len(same)))
    return found


def shared_beginning(texts: Collection[str]) -> int:
    """Number of characters, up to a space, that several texts begin with; 0 where these are few.

    >>> shared_beginning(["Say this word backwards: pan", "Say this word backwards: pot"])
    25
    >>> shared_beginning(["reverse pan", "reverse pot"]), shared_beginning(["Say this word backwards: pan"])
    (0, 0)
    """
    first, last = min(texts), max(texts)
    differs = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), 0)
    cut = max(first.rfind(space, 0, differs) for space in " \n") + 1
    return cut if cut >= LEAST_SHARED else 0


def _texts(row: Row) -> tuple[str, str, str]:
    """The last question, the answer and the truth of a row."""
    try:
        messages = decode_rollout(row.body).messages
    except WireError as error:
        return "", str(error), ""
    try:
        truth = wire.decode(row.asked, Task, BODY_BYTES).answer or ""
    except WireError:
        truth = ""
    users = [one.content for one in messages if one.role is Role.USER]
    answers = [said(one) for one in [one for one in messages if one.role is Role.ASSISTANT][-1:]]
    texts = [one.text or " ".join(f"{call.name}({call.arguments})" for call in one.calls) for one in answers]
    return "".join(users[-1:]), "".join(texts), truth


def shortened(text: str) -> str:
    """A text that a browser can show; of a huge one the beginning and the end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters; shoal export has them ...]\n{text[-half:]}"


def glance(text: str) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text[: 4 * GLANCE_CHARACTERS].split())
    return line if len(line) <= GLANCE_CHARACTERS else f"{line[:GLANCE_CHARACTERS]}..."


MOST_EVALUATIONS = 24
PER_PAGE = 50


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query: which questions, in which order."""

    run: str = ""
    text: str = ""
    sort: Literal["worse", "better", "lowest", "asked", "behind"] = "worse"
    other: str = ""
    """Another run whose last rewards are shown, too."""
    page: int = 1


@dataclass(frozen=True, slots=True)
class HeldOutQuestion:
    """One question with its mean sampled reward at each evaluation; None where no answer was scored."""

    id: str
    task: str
    text: str
    rewards: Sequence[float | None]
    other: float | None = None
    """The last reward of another run."""

    @property
    def lead(self) -> float:
        """The last reward less that of the other run; 0 where one is missing."""
        return 0.0 if self.other is None or self.rewards[-1] is None else self.rewards[-1] - self.other

    @property
    def change(self) -> float:
        """The last known reward less the first; 0 without two."""
        known = [reward for reward in self.rewards if reward is not None]
        return known[-1] - known[0] if known else 0.0

    @property
    def last(self) -> float:
        """The last known reward; 0 without any."""
        return next((reward for reward in reversed(self.rewards) if reward is not None), 0.0)


def spaced(files: Sequence[Path]) -> list[Path]:
    """At most `MOST_EVALUATIONS` of the files, evenly, with the first and the last.

    >>> [int(path.name) for path in spaced([Path(str(i)) for i in range(47)])][:3]
    [0, 2, 4]
    """
    last, parts = len(files) - 1, MOST_EVALUATIONS - 1
    return list(files) if last < parts else [files[round(i * last / parts)] for i in range(parts + 1)]


def questions(
    run_dir: Path, wanted: Questions, other: Path | None = None
) -> tuple[list[int], list[HeldOutQuestion], int]:
    """Steps of the evaluations, one page of questions, and the number of pages. Raises `RunDirError`."""
    files = spaced(answer_files(run_dir))
    scores = [_scores(file, file.stat().st_mtime_ns) for file in files]
    others = {} if other is None else _last_rewards(other)
    texts = {name: known for one in scores for name, known in one.texts.items()}
    found = [
        HeldOutQuestion(name, task, text, [one.rewards.get(name) for one in scores], others.get(name))
        for name, (task, text) in texts.items()
        if wanted.text.lower() in text.lower()
    ]
    orders = {
        "worse": lambda one: one.change,
        "better": lambda one: -one.change,
        "lowest": lambda one: one.last,
        "behind": lambda one: one.lead,
    }
    if wanted.sort in orders:
        found.sort(key=orders[wanted.sort])
    first = (max(1, wanted.page) - 1) * PER_PAGE
    return [one.step for one in scores], found[first : first + PER_PAGE], -(-len(found) // PER_PAGE)


def _last_rewards(run_dir: Path) -> dict[str, float | None]:
    newest = answer_files(run_dir)[-1:]
    return _scores(newest[0], newest[0].stat().st_mtime_ns).rewards if newest else {}


def answers(run_dir: Path, question_id: str) -> list[HeldOutAnswer]:
    """All answers to a question, newest first. Raises `RunDirError`."""
    files = reversed(spaced(answer_files(run_dir)))
    return [answer for file in files for answer in read_answers(file) if answer.question_id == question_id]


@dataclass(frozen=True, slots=True)
class _Scores:
    step: int
    rewards: dict[str, float | None]
    texts: dict[str, tuple[str, str]]
    """Task and beginning of each question."""


@lru_cache(maxsize=8 * MOST_EVALUATIONS)
def _scores(file: Path, _modified_ns: int) -> _Scores:
    rewards: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, tuple[str, str]] = {}
    for answer in read_answers(file):
        asked = reversed(answer.messages[: answer.asked])
        question = next((one.content for one in asked if one.role is Role.USER), "")
        texts[answer.question_id] = (answer.task, glance(question))
        if answer.purpose == "sampled" and answer.reward.status is RewardStatus.SCORED:
            rewards[answer.question_id].append(answer.reward.value)
    means = {name: fmean(rewards[name]) if name in rewards else None for name in texts}
    return _Scores(int(file.name.partition(".")[0]), means, texts)
