"""Facts about the client of a request, and the log of requests: a line for people, and a line of JSON in a file."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from starlette.requests import Request

from shoal.errors import ConfigError
from shoal.net.client import RETRY_HEADER

SESSION = "/s/"
"""Path prefix of sessions."""


def has_left(http: Request) -> bool:
    """Whether the server knows by now that the client of a fully read request has disconnected.

    It polls once and does not wait. Starlette's `is_disconnected` starts a wait and cancels it, which takes two more
    iterations of the event loop, behind all other requests.
    """
    receiving = http.receive().__await__()
    try:
        next(receiving)
    except StopIteration as message:
        return bool(message.value["type"] == "http.disconnect")
    finally:
        receiving.close()
    return False


def is_retry(http: Request) -> bool:
    """Whether a client library marks the request as a retry."""
    count = http.headers.get(RETRY_HEADER, "0")
    return count.isdigit() and count != "0"


def api_key(http: Request) -> str:
    """API key in the header of OpenAI's or Anthropic's clients."""
    return http.headers.get("x-api-key") or http.headers.get("authorization", "")[len("bearer ") :]


def shown_path(path: str) -> str:
    """Path for the log, with the session's key shortened."""
    if not path.startswith(SESSION):
        return path
    key, slash, rest = path.removeprefix(SESSION).partition("/")
    return f"{SESSION}{key[:8]}...{slash}{rest}"


FREE_PATHS = frozenset({"/health", "/metrics"})
"""Paths that monitors poll; they are not logged."""


@dataclass(slots=True)
class RequestRecord:
    """One request, without the text of its prompt and answer."""

    method: str
    path: str
    """Without the key of a session."""
    time_s: float = field(default_factory=time.time)
    """Time of arrival, in seconds since 1970."""
    status: int = 0
    """HTTP status; 0 when the client disconnected first."""
    id: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    """Reasons why the choices ended."""
    first_token_s: float = 0.0
    """Seconds until the first token of a stream; 0 without a stream."""
    duration_s: float = 0.0
    error: str = ""

    @property
    def line(self) -> str:
        """The line for people."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.time_s))
        parts = [clock, self.method, self.path, str(self.status or "gone"), f"{self.duration_s * 1000:.0f} ms"]
        if self.prompt_tokens or self.completion_tokens:
            parts.append(f"{self.prompt_tokens}+{self.completion_tokens} tokens")
        return " ".join([*parts, self.finish, self.error]).rstrip()


OnRequest = Callable[[RequestRecord], None]


class RequestLog:
    """Appends records to a file as lines of JSON, also to an existing file."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when the file cannot be written."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--log: expected a file that can be written, got {path}: {error.strerror}") from error

    def write(self, record: RequestRecord) -> None:
        """Appends one record."""
        os.write(self._file, msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
