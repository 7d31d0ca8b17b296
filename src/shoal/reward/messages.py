"""Messages of a scorer and its workers: a `Batch`, then a `WorkerReady` and an `AnswerVerdict` per answer, in order."""

import msgspec

from shoal.checker import Spec
from shoal.types import Receipt

MEMORY_BYTES = 2 << 30
"""Bytes of a worker's address space."""
OPEN_FILES = 64


class Batch(msgspec.Struct, frozen=True):
    """Answers to one task, with all that scores them."""

    spec: Spec
    receipt: Receipt | None
    truth: str | None
    info: str
    answers: list[str]
    cpu_s: float
    """Seconds of processor time of one answer."""


class WorkerReady(msgspec.Struct, frozen=True):
    """The task is prepared and the clock of the first answer runs; else `error` says why no answer can be scored.

    A worker also sends it once after its start, without a request.
    """

    error: str = ""


class AnswerVerdict(msgspec.Struct, frozen=True):
    """The verdict on one answer; `error` is set when the scorer itself is at fault."""

    value: float
    evidence: str = ""
    error: str = ""
    exhausted: bool = False
    """True if the answer used up its processor time."""
