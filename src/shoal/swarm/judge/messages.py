"""Judge and takers exchange signed messages: size, then schema, then signature, then use.

    taker -> judge   ChallengeRequest  asks for a challenge
    judge -> taker   Challenge         the questions and their deadline
    taker -> judge   Answers
    judge -> taker   ChallengeVerdict
    judge -> all     Round             the commitment, before; `Revealed` after

The signature covers the type of message, so no message passes for another type. A taker's messages name their judge, so
no judge can pass them on. The protocol keeps its keys: `sitting` is a round's number, `arm` the condition, and `marks`
the graded answers.

A commitment fixes questions before they are requested, and anyone can draw them afterwards. Before a round the
judge publishes the hash of a random seed, and afterwards the seed. The questions of a challenge follow from the seed,
the taker and the attempt. The judge cannot pick them, and the taker can neither foresee them nor use another's answers.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

from msgspec import Meta

from shoal import wire
from shoal.errors import WireError
from shoal.net.identity import Identity, is_signed_by, peer_id_of
from shoal.swarm.wire.envelope import UnixTime
from shoal.tasks.procedural_client import Spec
from shoal.types import Message, RewardStatus

MOST_BYTES = 256 * 1024
"""Bytes of a signed message. A judge with larger challenges does not start; a taker cuts longer answers."""
MOST_NAME_CHARACTERS = 100
MOST_ANSWER_CHARACTERS = 16_384
MOST_ANSWERS = 1024
_PURPOSE = b"shoal judge\x00"

T = TypeVar("T")


class Condition(StrEnum):
    """Training of a compared node."""

    SWARM = "swarm"
    SOLO = "solo"


@dataclass(frozen=True, slots=True)
class Round:
    """Statement before a round: all that its questions depend on, with the seed as a hash."""

    number: int
    opens_s: float  # Unix time
    closes_s: float
    reveals_s: float
    commitment: bytes
    each: int
    """Questions of every specialty in a challenge."""
    specialties: tuple[Spec, ...]
    """Datasets with the settings of their questions."""


@dataclass(frozen=True, slots=True)
class Revealed:
    """Seed of a finished round."""

    number: int
    seed: bytes


@dataclass(frozen=True, slots=True)
class ChallengeRequest:
    """Request of a challenge for a model that has had `round` training rounds."""

    judge: str
    """Peer id of the judge."""
    model: Annotated[str, Meta(min_length=1, max_length=MOST_NAME_CHARACTERS)]
    arm: Condition
    round: Annotated[int, Meta(ge=0, lt=2**40)]
    sent_s: UnixTime

    def __post_init__(self) -> None:
        if not self.model.isprintable():
            raise ValueError("model: expected printable characters")


@dataclass(frozen=True, slots=True)
class ChallengeQuestion:
    """Chat messages of one question."""

    specialty: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Challenge:
    """Questions for one model of one peer."""

    id: str
    sitting: int
    peer_id: str
    ask: ChallengeRequest
    attempt: int
    """Attempt of this peer and model in this round, from 0."""
    deadline_s: float  # Unix time
    questions: tuple[ChallengeQuestion, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """Texts of the answers, one per question, in order."""

    judge: str
    challenge: str
    texts: Annotated[tuple[Annotated[str, Meta(max_length=MOST_ANSWER_CHARACTERS)], ...], Meta(max_length=MOST_ANSWERS)]


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """Score of one answer; a value of 1 passes."""

    specialty: str
    value: float
    status: RewardStatus

    @property
    def passed(self) -> bool:
        """True for a right answer. An answer that hangs or breaks the scorer is wrong, so it cannot drop a hard
        question."""
        return self.status is RewardStatus.SCORED and self.value >= 1


@dataclass(frozen=True, slots=True)
class ChallengeVerdict:
    """Result of a challenge. `score` is pass@1: the share of its questions that were answered right."""

    challenge: str
    score: float
    marks: tuple[GradedAnswer, ...]


@dataclass(frozen=True, slots=True)
class PublicLedger:
    """Commitments of a judge as signed `Round`s, newest first, and its seeds as signed `Revealed`s."""

    sittings: tuple[bytes, ...]
    seeds: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Signed:
    author: bytes
    signature: bytes
    body: bytes


def commitment_of(seed: bytes) -> bytes:
    """Hashes a seed to 32 bytes, from which a random seed of 32 bytes cannot be found."""
    return hashlib.blake2b(seed, digest_size=32, person=b"shoal-commit").digest()


def signed(identity: Identity, message: object) -> bytes:
    """Encodes a message with its author's signature."""
    body = wire.encode(message)
    return wire.encode(_Signed(identity.public_key, identity.sign(_covered(type(message), body)), body))


def opened(data: bytes, type_: type[T], *, author: str | None = None) -> tuple[str, T]:
    """Decodes a message and its author's peer id. Raises `WireError`, also for another author."""
    frame = wire.decode(data, _Signed, MOST_BYTES)
    if not is_signed_by(frame.author, frame.signature, _covered(type_, frame.body)):
        raise WireError(f"expected a {type_.__name__} with its author's signature")
    peer_id = peer_id_of(frame.author)
    if author is not None and peer_id != author:
        raise WireError(f"{type_.__name__}: expected one of {author}, got one of {peer_id}")
    return peer_id, wire.decode(frame.body, type_, MOST_BYTES)


def _covered(type_: type, body: bytes) -> bytes:
    return _PURPOSE + type_.__name__.encode() + b"\x00" + body
