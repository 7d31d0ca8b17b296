"""An offer is C(q): a question with its rollouts as decoded text (SAPO, arXiv 2509.08721, algorithm 1). Pure.

An offer holds only data that crosses tokenizers: no token ids, no logprobs and no rewards, since the taker scores
itself. No claim in an offer changes its weight in training. The types bound the memory of decoding, which stops at the
first length that is too large.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from shoal import wire
from shoal.model.answer import written
from shoal.swarm.envelope import MAX_PAYLOAD_BYTES
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
    made_s: float  # Unix time at which the last rollout ended

    def __post_init__(self) -> None:
        if not 1 <= len(self.rollouts) <= MAX_ROLLOUTS:
            raise ValueError(f"rollouts: expected 1 to {MAX_ROLLOUTS}, got {len(self.rollouts)}")
        for field, name in (("model", self.model), ("service", self.claim.service)):
            if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():  # people see it, on terminals too
                expected = f"at most {MAX_NAME_CHARACTERS} printable characters"
                raise ValueError(f"{field}: expected {expected}, got {name[:80]!r}")
        if not self.claim.question:
            raise ValueError("question: expected text, got none")
        if not 0 <= self.made_s < 2**40:
            raise ValueError(f"made_s: expected a Unix time, got {self.made_s}")


@dataclass(frozen=True, slots=True)
class Want:
    """A node's weak tasks, so that peers may share groups that would help it."""

    needs: Annotated[tuple[tuple[Name, float], ...], Meta(max_length=MAX_WANTED)]
    """Task services with the missing share of the reward there: 0..1."""

    def __post_init__(self) -> None:
        if len(self.needs) > MAX_WANTED:
            raise ValueError(f"needs: expected at most {MAX_WANTED}, got {len(self.needs)}")
        for name, need in self.needs:
            if len(name) > MAX_NAME_CHARACTERS or not 0 <= need <= 1:
                raise ValueError(f"needs: expected names and numbers in 0..1, got {name[:80]!r} and {need}")


def encode(content: Offer | Want) -> bytes:
    """Encodes the payload of an envelope."""
    return wire.encode(content)


def decode(payload: bytes) -> Offer:
    """Decodes an offer. Raises `WireError` for any other payload."""
    return wire.decode(payload, Offer, MAX_PAYLOAD_BYTES)


def decode_want(payload: bytes) -> Want:
    """Decodes a want. Raises `WireError` for any other payload."""
    return wire.decode(payload, Want, MAX_PAYLOAD_BYTES)


def model_name(name: str) -> str:
    """Replaces characters that an offer cannot name a model with.

    >>> model_name("tiny\\n")
    'tiny?'
    """
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME_CHARACTERS])


def is_portable(rollout: Rollout, prompt_messages: int) -> bool:
    """Tells whether a rollout is one plain-text answer, readable by any node."""
    answer = rollout.messages[-1] if rollout.messages else None
    return (
        rollout.status is RolloutStatus.FINISHED
        and answer is not None
        and len(rollout.messages) == prompt_messages + 1
        and answer.role is Role.ASSISTANT
        and not answer.tool_calls
        and len(rollout.turns) <= 1
    )


def offer_of(group: Group, claim: Claim, *, generator: GeneratorKind, model: str, made_s: float) -> Offer | None:
    """Builds the offer of an own group; None when none of its rollouts is portable."""
    portable = [rollout for rollout in group.rollouts if is_portable(rollout, len(group.task.messages))]
    offered = tuple(_offered(rollout) for rollout in portable[:MAX_ROLLOUTS])
    return Offer(claim, offered, generator, model_name(model), made_s) if offered else None


def _offered(rollout: Rollout) -> OfferedRollout:
    return OfferedRollout(
        written(rollout.messages[-1]),
        complete=all(turn.completion.finish_reason is FinishReason.STOP for turn in rollout.turns),
    )
