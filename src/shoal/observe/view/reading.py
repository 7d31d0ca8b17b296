"""Rollouts as people read them: conversations with thoughts apart, rewards with their parts, a glance of each."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal import wire
from shoal.errors import WireError
from shoal.experience.log import BODY_BYTES
from shoal.experience.raw import RawGroup, RawRollout, decode_rollout
from shoal.model.answer import parted
from shoal.observe.view.index import Row
from shoal.types import Message, Role, Task, ToolCall

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
