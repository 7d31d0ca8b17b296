"""Where a swarm meets; checked without loading what connects to it."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.urls import NATS, checked_url
from shoal.errors import ConfigError

CREDENTIALS = "SHOAL_NATS_CREDENTIALS"
"""Names a NATS .creds file or an nkey seed."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """Where a swarm meets."""

    servers: tuple[str, ...]
    """URLs: nats://, tls:// or ws://, with user and password or a token in them if the server wants these."""
    swarm: str
    credentials: Path | None = None
    """A NATS .creds file, or an nkey seed."""
    tls_ca: Path | None = None
    """Whom to trust besides the system's authorities."""

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
    """Options from settings, with the credentials file that the environment names. Raises `ConfigError`.

    Authorities besides the system's come from SSL_CERT_FILE, which Python's ssl reads by itself.
    """
    credentials = os.environ.get(CREDENTIALS)
    return NatsOptions(tuple(servers), swarm, credentials=Path(credentials) if credentials else None)
