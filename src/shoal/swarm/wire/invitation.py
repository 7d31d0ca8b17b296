"""An invitation is the line with which another node joins; NATS options name the servers of a swarm."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from shoal.config import Config
from shoal.config.urls import NATS, checked_url
from shoal.errors import ConfigError
from shoal.interfaces import Environment
from shoal.tasks.procedural_client import ReasoningGymService

CREDENTIALS = "SHOAL_NATS_CREDENTIALS"
"""Environment variable with the path of a NATS .creds file or an nkey seed."""
KNOWN = "SHOAL_SWARM_KNOWN"
"""Environment variable with the ids of peers that a node trusts from its first step, separated by commas."""
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


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address, key and data sets of a swarm."""

    servers: tuple[str, ...]
    """URLs, with the token if there is one."""
    name: str
    datasets: tuple[str, ...]
    known: tuple[str, ...] = ()
    """Ids of the host's node and of peers that it trusts, so that no crowd of strangers comes before them."""
    credentials: str = ""
    """File with the seed of the guest's nkey; empty if a token is the key, or none is needed."""

    @property
    def line(self) -> str:
        """The command of a node that joins; `RUN.toml` is its own configuration."""
        settings = {"servers": self.servers, "name": self.name, "datasets": self.datasets}
        words = [f"--swarm.{name}={shlex.quote(json.dumps(value))}" for name, value in settings.items() if value]
        given = {CREDENTIALS: self.credentials, KNOWN: ",".join(self.known)}
        before = [f"{name}={shlex.quote(value)}" for name, value in given.items() if value]
        return " ".join([*before, "shoal train RUN.toml", "--swarm.external_groups=4", *words])


def known_peers() -> list[str]:
    """The ids in `SHOAL_SWARM_KNOWN`. Raises `ConfigError`."""
    found = [one for one in os.environ.get(KNOWN, "").split(",") if one]
    for one in found:
        if not re.fullmatch("[0-9a-f]{32}", one):
            raise ConfigError(f"{KNOWN}: expected ids of 32 hexadecimal digits between commas, got {one!r}")
    return found


def invitation(
    config: Config, services: Sequence[Environment], known: Sequence[str], token: str, credentials: str = ""
) -> Invitation:
    """Builds the invitation to the swarm of a configuration. Raises `ConfigError` and `TaskError`."""
    if not config.swarm.servers:
        raise ConfigError("swarm.servers: expected the address at which guests reach the swarm, got none")
    servers = tuple(_with_token(url, token) for url in config.swarm.servers)
    datasets = tuple(one.spec.dataset for one in services if isinstance(one, ReasoningGymService))
    return Invitation(servers, config.swarm.name, datasets, tuple(known), credentials)


def guest_key(path: Path) -> str:
    """Makes an nkey for a guest and writes its seed, readable by its owner only; returns the public key.

    The server's accounts list the public key. Raises `ConfigError` for a file that exists.
    """
    import nkeys  # type: ignore[import-untyped]

    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(seed + b"\n")
    except OSError as error:
        raise ConfigError(f"--nkey {path}: expected a file that can be made, got {error.strerror}") from None
    public: bytes = nkeys.from_seed(bytearray(seed)).public_key
    return public.decode()


def _with_token(url: str, token: str) -> str:
    """A server's URL with the token, unless it has a user already."""
    parts = urlsplit(url)
    if not token or "@" in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"{quote(token, safe='')}@{parts.netloc}"))
