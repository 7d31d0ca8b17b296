"""The tree of errors.

    ShoalError                a user error: the CLI prints one sentence and exits with code 2
    ├── ConfigError           a configuration that cannot be run: names the field, what was expected, what came
    ├── ModelError            a model directory that cannot be used
    ├── TaskError             an unknown task, or one whose data cannot be read
    │   ├── OtherRelease      a question of another release of its dataset
    │   └── OutOfBounds       a question larger, or with other settings, than this node draws for peers
    ├── RunDirError           a run directory that cannot be written, read or resumed
    │   └── LogBehind         its checkpoint has steps that its log has lost
    ├── EngineError           an engine that cannot do what was asked
    │   ├── RequestRefused    the request itself is wrong (HTTP 4xx); trying again does not help
    │   └── EngineUnavailable the engine is gone, full or paused; trying again may help
    ├── SessionError          a request that a session cannot serve
    │   └── ContextOverflow   it leaves no room for an answer
    ├── TrainerError          the trainer process failed or refused a batch
    ├── SandboxUnavailable    this machine has no sandbox to run untrusted programs in
    ├── ExchangeUnavailable   no server of the swarm can be reached; the node goes on alone
    ├── JudgeError            a judge that cannot be reached, or that refuses what was asked of it
    ├── ChildDied             a child process ended without being asked to
    ├── StoodStill            a run that made no progress for long, despite all remedies
    └── WireError             bytes that are not what they claim to be

Our own bugs are `AssertionError`s and keep their traceback.
"""

import difflib
import re
from collections.abc import Callable, Iterable

MASK = "***"
MOST_LISTED = 16
"""Number of known names up to which an error lists them all, in addition to the nearest."""
MOST_CHARACTERS = 80
ALIKE = 0.6
"""Least similarity, from 0 to 1, of a misspelled name."""
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+(?=@)")


def without_credentials(text: str) -> str:
    """The text with the credentials of its URLs masked.

    >>> without_credentials("no answer from http://me:secret@here:8000/info")
    'no answer from http://***@here:8000/info'
    """
    return _CREDENTIALS.sub(MASK, text)


def did_you_mean(given: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """The end of an error about an unknown name: the nearest known name; empty without a near one.

    >>> did_you_mean("gspoo", ["grpo", "gspo"]), did_you_mean("x", ["grpo"])
    ("; did you mean 'gspo'?", '')
    """
    names = {name.lower(): name for name in known}
    begun = [name for name in names if given and name.startswith(given.lower())]
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=ALIKE) or begun
    return f"; did you mean {shown(names[near[0]])}?" if near else ""


def expected_one_of(known: Iterable[str], given: object, also: str = "") -> str:
    """The error about an unknown name; `also` names further valid input.

    >>> expected_one_of(["pad", "keep"], "kep")
    "expected one of pad, keep, got 'kep'; did you mean 'keep'?"
    """
    names = list(known)
    hint = did_you_mean(str(given), names)
    listed = (
        "a known name" if hint and len(names) > MOST_LISTED else f"{'one of ' * (len(names) > 1)}{', '.join(names)}"
    )
    return f"expected {listed}{also}, got {repr(given)[:MOST_CHARACTERS]}{hint}"


class ShoalError(Exception):
    """A user error: the text says what was expected, what came and what to do."""

    http_status = 500
    """Status of a server's answer to a request that fails with this error."""

    def __init__(self, text: str = "") -> None:
        """Credentials of URLs in the text are masked: errors become events, logs and pages."""
        super().__init__(without_credentials(text))


class ConfigError(ShoalError):
    """A configuration that cannot be run."""


class ModelError(ShoalError):
    """A model directory that cannot be used."""


class TaskError(ShoalError):
    """An unknown task, or one whose data cannot be read."""

    http_status = 409


class OtherRelease(TaskError):
    """A question of another release of its dataset."""


class OutOfBounds(TaskError):
    """The question is larger, or has other settings, than this node draws for peers."""


class RunDirError(ShoalError):
    """A run directory that cannot be written, read or resumed."""


class LogBehind(RunDirError):
    """A checkpoint has steps that the log has lost: resuming would train their groups again."""


class EngineError(ShoalError):
    """An engine that cannot do what was asked."""

    http_status = 400


class RequestRefused(EngineError):
    """The request itself is wrong; trying again does not help."""

    http_status = 400


class EngineUnavailable(EngineError):
    """The engine is gone, full or paused; trying again may help."""

    http_status = 503


class WrongAnswer(EngineUnavailable):
    """An answer that no engine with the run's weights gives."""


class SessionError(ShoalError):
    """A request that a session cannot serve."""

    http_status = 400


class ContextOverflow(SessionError):
    """A prompt that leaves no room for an answer."""


class TrainerError(ShoalError):
    """The trainer process failed or refused a batch."""


class SandboxUnavailable(ShoalError):
    """This machine cannot sandbox untrusted programs; the text says how to get the missing parts."""


class ExchangeUnavailable(ShoalError):
    """No server of the swarm can be reached; trying again may help."""


class JudgeError(ShoalError):
    """A judge that cannot be reached, or that refuses what was asked of it."""


class ChildDied(ShoalError):
    """A child process ended without being asked to."""

    http_status = 503


class WorkerLost(ChildDied):
    """The process of a role or of a rank group has left; another one can take its place."""


class StoodStill(ShoalError):
    """A run that made no progress for long, despite all remedies."""


class WireError(ShoalError):
    """Bytes that are not what they claim to be."""
