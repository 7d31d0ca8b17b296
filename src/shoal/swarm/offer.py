"""An offer is C(q): a question with its rollouts as decoded text (SAPO, arXiv 2509.08721, algorithm 1). Pure.

An offer holds only data that crosses tokenizers: no token ids, no logprobs and no rewards, since the taker scores
itself. No claim in an offer changes its weight in training. The types bound the memory of decoding, which stops at the
first length that is too large.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from shoal.model.answer import written
from shoal.swarm.envelope import UnixTime
from shoal.types import FinishReason, Group, Receipt, Role, Rollout, RolloutStatus

MAX_ROLLOUTS = 64
MAX_WANTED = 64
MAX_NAME_CHARACTERS = 200

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]


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


@dataclass(frozen=True, slots=True)
class OfferedRollout:
    """One answer; `complete` is False for an answer that ran out of room."""

    text: str
    complete: bool = True


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
class Want:
    """A node's weak tasks, so that peers may share groups that would help it."""

    needs: Annotated[tuple[tuple[Name, Annotated[float, Meta(ge=0, le=1)]], ...], Meta(max_length=MAX_WANTED)]
    """Task services with the missing share of the reward there: 0..1."""


def model_name(name: str) -> str:
    """Replaces characters that an offer cannot name a model with.

    >>> model_name("tiny\\n")
    'tiny?'
    """
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME_CHARACTERS])


def is_portable(rollout: Rollout, prompt_messages: int) -> bool:
    """Tells whether a rollout is one plain-text answer, readable by any node."""
    answers = rollout.messages[prompt_messages:]
    one_turn = rollout.status is RolloutStatus.FINISHED and len(answers) == 1 and len(rollout.turns) <= 1
    return one_turn and answers[0].role is Role.ASSISTANT and not answers[0].tool_calls


def offer_of(group: Group, claim: Claim, model: str, made_s: float) -> Offer:
    """Builds the offer of an own group. Raises `ValueError` when none of its rollouts is portable."""
    portable = [rollout for rollout in group.rollouts if is_portable(rollout, len(group.task.messages))]
    offered = []
    for rollout in portable[:MAX_ROLLOUTS]:
        complete = all(turn.completion.finish_reason is FinishReason.STOP for turn in rollout.turns)
        offered.append(OfferedRollout(written(rollout.messages[-1]), complete))
    return Offer(claim, tuple(offered), GeneratorKind.TRAINING, model_name(model), made_s)
