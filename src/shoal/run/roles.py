"""The registry of a run, opened where `cluster.listen` says: roles of other hosts join there, and pull Versions.

The run's token is in the environment, or is made and kept in the run directory, as is the key that signs manifests.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.cluster.on_ray import RayPlan, started
from shoal.cluster.registry import RunInfo
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.files import replaced
from shoal.net.client import TOKEN_VARIABLE
from shoal.net.identity import Identity
from shoal.net.listening import tls_files
from shoal.net.run_server import RunServer
from shoal.net.server import json
from shoal.run.backup import KEY_FILE
from shoal.run.prepare import Prepared
from shoal.weights.serving import VersionServer
from shoal.weights.store import WeightStore

TOKEN_FILE = "run.token"

OnEvent: TypeAlias = Callable[..., None]
"""Callback that gets the name of an event, and its details by keyword."""


def run_token(config: Config) -> str:
    """Token of a run: the user's, else that of the resumed run, else a new one; empty when no role registers."""
    if not config.cluster.listen:
        return ""
    kept = Path(config.run_dir) / TOKEN_FILE
    return os.environ.get(TOKEN_VARIABLE) or (kept.read_text() if kept.exists() else secrets.token_urlsafe(24))


@contextmanager
def launched(config: Config, token: str, show: Callable[[str], None]) -> Iterator[None]:
    """Has Ray start the roles of `cluster`, and keep them, within the block.

    Starts nothing without a Ray cluster. `show` gets a sentence for a role that ends too often or finds no room. Raises
    `ConfigError` when Ray is not installed.
    """
    cluster = config.cluster
    if not cluster.address:
        yield
        return
    if find_spec("ray") is None:
        raise ConfigError("cluster.address: expected the package ray, which 'shoal[cluster]' brings, got none")
    ranks, engines = cluster.trainer, cluster.engines
    plan = RayPlan(
        cluster.address,
        f"{'https' if tls_files() else 'http'}://{cluster.listen}",
        str(Path(config.run_dir).absolute() / "logs"),
        hosts=ranks.hosts if ranks else 0,
        gpus=ranks.gpus if ranks else 0,
        engines=engines.count if engines else 0,
        engine_gpus=engines.gpus if engines else 0,
        engine_command=engines.command if engines else [],
        rewards=cluster.rewards,
    )
    with started(plan, token, show):
        yield


@asynccontextmanager
async def opened_roles(prepared: Prepared, store: WeightStore, on_event: OnEvent) -> AsyncIterator[RunServer | None]:
    """Opens the registry and serves Versions; None when no role of another host may join."""
    config = prepared.config
    if config.services_at is None or not config.cluster.listen:
        yield None
        return
    identity = kept_identity(config, prepared.token)
    info = RunInfo(
        identity.public_key,
        config.model.model_dump_json(),
        config.engine.model_dump_json(),
        prepared.sampling,
        prepared.max_model_len,
        replays=config.train.router_replay,
    )
    shared: RunServer | None = getattr(prepared.service, "task_server", None)
    versions = VersionServer(store, prepared.model_dir, identity)
    async with run_server(config, prepared.token, shared) as server:
        with registry(server, info, versions, lambda name, state: on_event("role", role=name, state=state)):
            on_event("roles", url=server.url, token_file=str(Path(config.run_dir) / TOKEN_FILE))
            yield server


def kept_identity(config: Config, token: str) -> Identity:
    """Identity of a run; it and the token stay in the run directory."""
    run_dir = Path(config.run_dir)
    with replaced(run_dir / TOKEN_FILE, private=True) as unfinished:
        unfinished.write_text(token)
    return Identity.load(run_dir / KEY_FILE)


@asynccontextmanager
async def run_server(config: Config, token: str, shared: RunServer | None = None) -> AsyncIterator[RunServer]:
    """The server that listens already, or one where `cluster.listen` says."""
    if shared is not None:
        yield shared
        return
    assert config.services_at is not None
    host, port = config.services_at
    own = RunServer(host=host, port=port, token=token).__enter__()
    try:
        yield own
    finally:
        await asyncio.to_thread(own.__exit__, None, None, None)  # its last answers need this event loop


@contextmanager
def registry(
    server: RunServer, info: RunInfo, versions: VersionServer, on_event: Callable[[str, str], None]
) -> Iterator[None]:
    """Describes the run to roles, and serves Versions; `on_event` gets the name of a role and what became of it."""
    loop = asyncio.get_running_loop()

    async def described(_: Request) -> Response:
        return json(info)

    def notify(name: str, state: str) -> None:
        with suppress(RuntimeError):  # the event loop of the run has ended
            loop.call_soon_threadsafe(on_event, name, state)

    server.on_role = notify
    try:
        with server.added([Route("/v1/run", described), *versions.routes]):
            yield
    finally:
        server.on_role = lambda name, state: None
