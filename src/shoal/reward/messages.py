"""Messages of a scorer and its workers: a `Batch`, then a `WorkerReady` and an `AnswerVerdict` per answer, in order."""

import msgspec

from shoal.checker import Spec
from shoal.types import Receipt

MEMORY_BYTES = 2 << 30
"""Address space of a worker."""
OPEN_FILES = 64


class Batch(msgspec.Struct, frozen=True):
    """Answers to one task, and what is needed to score them."""

    spec: Spec
    receipt: Receipt | None
    truth: str | None
    info: str
    answers: list[str]
    cpu_s: float
    """Processor time of one answer."""


class WorkerReady(msgspec.Struct, frozen=True):
    """The task is prepared and the clock of the first answer runs; or `error` says why no answer can be scored.

    A worker says it once, without being asked, when it has started.
    """

    error: str = ""


class AnswerVerdict(msgspec.Struct, frozen=True):
    """Of one answer; `error` when the scorer itself is at fault."""

    value: float
    evidence: str = ""
    error: str = ""
    exhausted: bool = False
    """The answer used up its processor time."""
