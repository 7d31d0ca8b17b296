"""Rollouts as people read them: conversations with thoughts apart, rewards with their parts, a glance of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal import wire
from shoal.errors import WireError
from shoal.experience.log import BODY_BYTES
from shoal.experience.raw import RawGroup, RawRollout, decode_rollout
from shoal.model.answer import parted
from shoal.observe.view.index import Row
from shoal.types import Message, Role, Task, ToolCall

GLANCE_CHARACTERS = 160
MOST_CHARACTERS = 20_000
"""Length from which on the middle of a text is left out."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message."""

    role: str
    thought: str
    text: str
    calls: Sequence[ToolCall]
    answers_call: str


@dataclass(frozen=True, slots=True)
class Shown:
    """One rollout of a group; `broken` says why it cannot be read."""

    position: int
    rollout: RawRollout | None
    said: Sequence[Said] = ()
    versions: Sequence[int] = ()
    broken: str = ""


def asked(group: RawGroup) -> Task | None:
    """The question of a group; None when it cannot be read."""
    try:
        return wire.decode(group.task, Task, BODY_BYTES)
    except WireError:
        return None


def shown(position: int, body: bytes, question: Sequence[Message]) -> Shown:
    """One rollout, without the question that all of its group begin with."""
    try:
        one = decode_rollout(body)
    except WireError as error:
        return Shown(position, None, broken=str(error))
    new = one.messages[len(question) :] if tuple(question) == one.messages[: len(question)] else one.messages
    return Shown(position, one, [said(message) for message in new], one.sampled_versions)


def said(message: Message) -> Said:
    """One message, its thought apart from what is answered."""
    thought, text = message.reasoning, message.content
    if message.role is Role.ASSISTANT and not thought and "</think>" in text:
        whole = parted(text)
        thought, text = whole.thought, whole.answer
    return Said(message.role.value, shortened(thought), shortened(text), message.tool_calls, message.tool_call_id)


def glance(row: Row) -> tuple[str, str]:
    """The last question and the answer of a row, a line of each."""
    try:
        messages = decode_rollout(row.body).messages
    except WireError as error:
        return "", str(error)
    users = [one.content for one in messages if one.role is Role.USER]
    answers = [said(one) for one in [one for one in messages if one.role is Role.ASSISTANT][-1:]]
    texts = [one.text or " ".join(f"{call.name}({call.arguments})" for call in one.calls) for one in answers]
    return _line("".join(users[-1:])), _line("".join(texts))


def shortened(text: str) -> str:
    """A text that a browser can show; of a huge one the beginning and the end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters; shoal export has them ...]\n{text[-half:]}"


def _line(text: str) -> str:
    line = " ".join(text[: 4 * GLANCE_CHARACTERS].split())
    return line if len(line) <= GLANCE_CHARACTERS else f"{line[:GLANCE_CHARACTERS]}..."
