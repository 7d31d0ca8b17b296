"""NATS options name a swarm's servers; checking them loads no client."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config.urls import NATS, checked_url
from shoal.errors import ConfigError

CREDENTIALS = "SHOAL_NATS_CREDENTIALS"
"""Environment variable with the path of a NATS .creds file or an nkey seed."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """Servers and credentials of a swarm. Python's ssl reads further authorities from SSL_CERT_FILE by itself."""

    servers: Sequence[str]
    """URLs nats://, tls:// or ws://, with user and password or a token if the server wants these."""
    swarm: str
    credentials: Path | None = field(
        default_factory=lambda: Path(path) if (path := os.environ.get(CREDENTIALS)) else None
    )
    """Path of a NATS .creds file or an nkey seed; that of the environment by default."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not self.servers:
            raise ConfigError("swarm.servers: expected at least one URL, got none")
        for url in self.servers:
            checked_url("swarm.servers", url, NATS)
        if not _NAME.fullmatch(self.swarm):
            raise ConfigError(f"swarm.name: expected letters, digits, - and _, got {self.swarm!r}")
        if self.credentials is not None and not self.credentials.is_file():
            raise ConfigError(f"{CREDENTIALS}: {self.credentials} does not exist")
