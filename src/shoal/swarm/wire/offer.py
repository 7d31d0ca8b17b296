"""An offer is C(q): a question with its rollouts as decoded text (SAPO, arXiv 2509.08721, algorithm 1). Pure.

An offer holds only data that crosses tokenizers: no token ids, no logprobs and no rewards, since the taker scores
itself. An answer is a text, or the messages of a conversation with the sampled ones marked. No claim in an offer
changes its weight in training. The types bound the memory of decoding: it stops at the first length that is too large.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from shoal.model.answer import parted, written
from shoal.swarm.wire.envelope import UnixTime
from shoal.types import FinishReason, Group, Message, Receipt, Reward, Role, Rollout, RolloutStatus, ToolCall

MAX_ROLLOUTS = 64
MAX_TURNS = 64
MAX_CALLS = 16
MAX_NAME_CHARACTERS = 200

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Digest = Annotated[str, Meta(pattern="^(?:[0-9a-f]{64})?$")]


class GeneratorKind(StrEnum):
    """Kind of generator that sampled the rollouts."""

    TRAINING = "training"
    """Generator that trains its model."""
    FROZEN = "frozen"
    """Generator whose model stays as it is."""
    RULE = "rule"
    """Generator that is a program."""
    PERSON = "person"


@dataclass(frozen=True, slots=True)
class Claim:
    """A task as one node describes it to others: the question before any node's own prompt, and the truth."""

    service: str
    question: str
    truth: str | None
    receipt: Receipt | None = None
    libraries: str = ""
    """Releases besides reasoning-gym's that may have changed the question."""
    source: Digest = ""
    """SHA-256 of the Python task that drew the question; empty for tasks of other kinds."""


@dataclass(frozen=True, slots=True)
class OfferedTurn:
    """One message of a conversation after its question; a thought stands in `<think>` before its answer."""

    role: Role
    content: str
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_CALLS)] = ()
    tool_call_id: str = ""
    sampled: bool = False
    """True if the generator sampled it."""
    complete: bool = True
    """False for a message that ran out of room, by its author's word, which takers do not believe."""

    @property
    def message(self) -> Message:
        """The message, with thought and answer apart."""
        if not self.sampled:
            return Message(self.role, self.content, self.tool_calls, self.tool_call_id)
        said = parted(self.content)
        return Message(self.role, said.answer, self.tool_calls, self.tool_call_id, said.thought)


@dataclass(frozen=True, slots=True)
class OfferedRollout:
    """One answer, or one conversation; `complete` is as in `OfferedTurn`."""

    text: str
    """The answer; empty for a conversation."""
    complete: bool = True
    turns: Annotated[tuple[OfferedTurn, ...], Meta(max_length=MAX_TURNS)] = ()
    """The messages of a conversation after its question."""

    @property
    def said(self) -> str:
        """All that the generator sampled, as one text."""
        if not self.turns:
            return self.text
        calls = [call.name + call.arguments for turn in self.turns if turn.sampled for call in turn.tool_calls]
        return "\n".join([*(turn.content for turn in self.turns if turn.sampled), *calls])


@dataclass(frozen=True, slots=True)
class Offer:
    """A question with answers to it, as one node shares it."""

    claim: Claim
    rollouts: Annotated[tuple[OfferedRollout, ...], Meta(max_length=MAX_ROLLOUTS)]
    generator: GeneratorKind
    model: Name
    """Name of the model, for people; printable and without effect."""
    made_s: UnixTime
    """End of the last rollout."""

    def __post_init__(self) -> None:
        for field, name in (("model", self.model), ("service", self.claim.service)):
            if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():  # people see it, on terminals too
                expected = f"at most {MAX_NAME_CHARACTERS} printable characters"
                raise ValueError(f"{field}: expected {expected}, got {name[:80]!r}")
        if not self.claim.question or not self.rollouts:
            raise ValueError("expected a question and an answer")


@dataclass(frozen=True, slots=True)
class AskedFor:
    """One request of an environment to its model."""

    messages: tuple[Message, ...]
    tools: str = ""
    """JSON array of tools; empty for none."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of an offered rollout in this node's own environment; nothing but the answers are the peer's."""

    asked: tuple[AskedFor, ...] = ()
    """Requests of an environment that converses; none for one question with one answer."""
    reward: Reward | None = None
    """None leaves it to the task's checker."""
    answer: str | None = None
    """The answer that a checker scores; None stands for the whole text."""
    turn_rewards: tuple[float, ...] = ()


def model_name(name: str) -> str:
    """Replaces characters that an offer cannot name a model with.

    >>> model_name("tiny\\n")
    'tiny?'
    """
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME_CHARACTERS])


def is_portable(rollout: Rollout, prompt_messages: int, *, conversations: bool = False) -> bool:
    """Tells whether a rollout is one plain-text answer, readable by any node; or one of the `conversations`.

    A conversation goes on from each sampled answer to the next, without branches.
    """
    answers = rollout.messages[prompt_messages:]
    if rollout.status is not RolloutStatus.FINISHED or not answers or answers[-1].role is not Role.ASSISTANT:
        return False
    if len(answers) == 1 and len(rollout.turns) <= 1:
        return conversations or not answers[0].tool_calls
    sampled = sum(message.role is Role.ASSISTANT for message in answers)
    in_line = all(turn.parent == (number - 1 if number else None) for number, turn in enumerate(rollout.turns))
    return conversations and in_line and sampled == len(rollout.turns) and len(answers) <= MAX_TURNS


def offer_of(group: Group, claim: Claim, model: str, made_s: float) -> Offer:
    """Builds the offer of an own group.

    Only the claim of a Python task has conversations. Raises `ValueError` when none of the rollouts is portable.
    """
    prompt, conversations = len(group.task.messages), bool(claim.source)
    portable = [one for one in group.rollouts if is_portable(one, prompt, conversations=conversations)]
    rollouts = tuple(offered(rollout, prompt) for rollout in portable[:MAX_ROLLOUTS])
    return Offer(claim, rollouts, GeneratorKind.TRAINING, model_name(model), made_s)


def offered(rollout: Rollout, prompt: int) -> OfferedRollout:
    """The messages of a rollout after the `prompt` messages of its question, as an offer has them."""
    complete = [turn.completion.finish_reason is FinishReason.STOP for turn in rollout.turns]
    answers = rollout.messages[prompt:]
    if len(answers) == 1 and not answers[0].tool_calls:
        found = OfferedRollout(written(answers[0]), all(complete))
    else:
        ends, turns = iter(complete), list[OfferedTurn]()
        for one in answers:
            sampled = one.role is Role.ASSISTANT
            text, whole = (written(one), next(ends, True)) if sampled else (one.content, True)
            turns.append(OfferedTurn(one.role, text, one.tool_calls, one.tool_call_id, sampled, whole))
        found = OfferedRollout("", True, tuple(turns))
    return found
