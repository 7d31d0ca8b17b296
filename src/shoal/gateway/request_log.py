"""Log of a gateway's requests: a line for people, and a line of JSON in a file."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.errors import ConfigError

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
