"""NATS options name a swarm's servers; checking them loads no client."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.urls import NATS, checked_url
from shoal.errors import ConfigError

CREDENTIALS = "SHOAL_NATS_CREDENTIALS"
"""Environment variable with the path of a NATS .creds file or an nkey seed."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """Servers and credentials of a swarm."""

    servers: tuple[str, ...]
    """URLs nats://, tls:// or ws://, with user and password or a token if the server wants these."""
    swarm: str
    credentials: Path | None = None
    """Path of a NATS .creds file or an nkey seed."""
    tls_ca: Path | None = None
    """Path of certificates that are trusted besides the system's authorities."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("swarm.servers: expected at least one URL, got none")
        for url in self.servers:
            checked_url("swarm.servers", url, NATS)
        if not _NAME.fullmatch(self.swarm):
            raise ConfigError(f"swarm.name: expected letters, digits, - and _, got {self.swarm!r}")
        for name, path in ((CREDENTIALS, self.credentials), ("the swarm's certificate", self.tls_ca)):
            if path is not None and not path.is_file():
                raise ConfigError(f"{name}: {path} does not exist")


def options_of(servers: Sequence[str], swarm: str) -> NatsOptions:
    """Builds the options from settings and the environment's credentials file. Raises `ConfigError`.

    Python's ssl reads further authorities from SSL_CERT_FILE by itself.
    """
    credentials = os.environ.get(CREDENTIALS)
    return NatsOptions(tuple(servers), swarm, credentials=Path(credentials) if credentials else None)
