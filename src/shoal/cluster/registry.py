"""The roles of other hosts at a run, and what a run says about itself: `GET /v1/run`."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec

from shoal.errors import ConfigError, EngineUnavailable, RequestRefused, ShoalError
from shoal.net.client import LEASE_S, TOKEN_VARIABLE, Client
from shoal.net.joining import ASK_AGAIN_S, PROTOCOL, UNAUTHORIZED, RunRole, waiting, without_repeats
from shoal.types import Sampling

PROCESS = secrets.token_hex(8)
"""Name of this process, which no other has."""
Url: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/@]{1,255}$")]
Address: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^\s/@]{1,255}$")]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Secret: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""Name that OpenSSL gives the error."""


class RunInfo(msgspec.Struct, frozen=True):
    """Description of a run for its roles."""

    key: bytes
    """Public key that signs the manifests, and by which a role tells this run from another."""
    model_json: str
    """Section `config.ModelConfig`; its `path` is not used."""
    engine_json: str
    sampling: Sampling
    max_model_len: int | None
    """None for the model's own."""
    adapters: bool = False
    """Whether requests name adapters, which only Shoal's own engine serves by name."""
    replays: bool = False
    """Whether the experts of each token must come with it."""
    process: str = PROCESS
    """Process of the run: one that goes on from an older copy may have other Versions under the same numbers."""
    protocol: int = PROTOCOL


class EngineRole(RunRole, frozen=True, tag="engine", forbid_unknown_fields=True):
    """An engine that answers at `url`, to requests with its `token`."""

    url: Url
    token: Secret


class RewardsRole(RunRole, frozen=True, tag="rewards", forbid_unknown_fields=True):
    """A scorer, which answers over its lease."""


class WorkspacesRole(RunRole, frozen=True, tag="workspaces", forbid_unknown_fields=True):
    """A host that plays rollouts in workspaces, `max_running` at once."""

    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)]


class RankRole(RunRole, frozen=True, tag="trainer", forbid_unknown_fields=True):
    """A rank of the trainer; others reach it at `address`, where `port` is free in case that it is the first."""

    address: Address
    port: Port
    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number that a launcher gave it; the run numbers ranks without one."""
    ranks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of all ranks that a launcher started."""
    gpu_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Memory of its GPU; 0 on a CPU."""


class Gathered(msgspec.Struct, frozen=True):
    """First request to a rank, once all are there: it starts."""

    rank: int
    ranks: int
    per_copy: int | None
    """Ranks that share one copy of the weights; None for all."""
    master: str
    """HOST:PORT of the first rank."""


class OtherRun(ShoalError):
    """Another run answers at the URL now."""


async def run_info(client: Client, key: bytes | None = None) -> RunInfo:
    """Asks the run about itself.

    Raises `EngineUnavailable` when no run answers, `ConfigError` without its token and for a certificate that is not
    trusted here; with a `key`, raises `OtherRun` when a run with another one answers.
    """
    try:
        info = await client.ask("GET", "/v1/run", RunInfo)
    except EngineUnavailable as error:
        if UNTRUSTED in str(error):
            raise ConfigError(f"{error}; SSL_CERT_FILE names the authority of its certificate") from None
        raise
    except RequestRefused as error:  # a run that begins has no such route yet
        if f"HTTP {UNAUTHORIZED}" in str(error):
            raise ConfigError(f"{client.url} wants its token; set {TOKEN_VARIABLE}") from None
        raise EngineUnavailable(str(error)) from None
    if info.protocol != PROTOCOL:
        raise ConfigError(f"{client.url}: expected protocol {PROTOCOL}, got {info.protocol}; install its Shoal")
    if key not in (None, info.key):
        raise OtherRun(f"another run answers at {client.url}")
    return info


async def first_info(client: Client, announce: Callable[[str], None]) -> RunInfo:
    """Description of the run, as soon as it answers. Raises `ConfigError` as `run_info` does."""
    say = without_repeats(announce)
    while True:
        try:
            async with asyncio.timeout(LEASE_S):
                return await run_info(client)
        except (EngineUnavailable, TimeoutError) as error:
            say(waiting(client.url, error))
        await asyncio.sleep(ASK_AGAIN_S)
