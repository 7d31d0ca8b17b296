"""Roles of other hosts at a Tinker server: engines that sample for it, and the rank that trains for it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from pydantic import JsonValue

from shoal.cluster.rank_group import RankGroup
from shoal.cluster.registry import EngineRole, RunInfo
from shoal.config import Config, parse
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.named_models import NumberedWeights
from shoal.engine.server.http_client import PullingEngine
from shoal.errors import ConfigError
from shoal.net.run_server import LeasedWorker, RunServer
from shoal.run.roles import kept_identity, launched, registry, run_server, run_token
from shoal.trainer.worker import TrainerProcess
from shoal.types import Sampling
from shoal.weights.serving import VersionServer

if TYPE_CHECKING:
    from shoal.tinker.models_trainer import ServerSettings
    from shoal.tinker.service import TinkerService

OnStep = Callable[[str, int, Mapping[str, float]], None]


def cluster_config(settings: "ServerSettings", overrides: Sequence[str]) -> Config | None:
    """Configuration of a run with the settings of `[cluster]`; None without any. Raises `ConfigError`."""
    others = [one for one in overrides if not one.removeprefix("--").startswith("cluster.")]
    if others:
        raise ConfigError(f"{others[0]}: expected an option of this command or a setting of [cluster]")
    if not overrides and settings.engines:
        return None
    base = str(next(iter(settings.bases.values())))
    run: dict[str, JsonValue] = {
        "model": {"path": base, "dtype": settings.dtype, "device": settings.device},
        "run_dir": str(settings.folder),
        "tasks": [{"name": "chain_sum"}],
        "engine": {"count": settings.engines},
    }
    config = parse(run, overrides)
    cluster = config.cluster
    if len(settings.bases) > 1:
        raise ConfigError(f"--model: expected one with cluster.listen, whose roles pull it; got {len(settings.bases)}")
    if cluster.trainer is not None and cluster.trainer.ranks > 1:
        raise ConfigError(f"cluster.trainer: expected one rank, which trains all adapters; got {cluster.trainer.ranks}")
    if cluster.engines is not None and cluster.engines.command:
        raise ConfigError(
            "cluster.engines.command: expected none, a Tinker server needs the adapters of Shoal's engine"
        )
    return config


@asynccontextmanager
async def joinable(
    config: Config, settings: "ServerSettings", on_step: OnStep, on_event: Callable[[str, str], None]
) -> AsyncIterator["tuple[TinkerService, str]"]:
    """Service whose engines and trainer come from other hosts, and the URL where they join.

    `on_event` gets the name of a role and what became of it.
    """
    from shoal.tinker.service import TinkerService  # the package tinker loads torch

    ((name, model_dir),) = settings.bases.items()
    token = run_token(config)
    settings.folder.mkdir(parents=True, exist_ok=True)
    identity = kept_identity(config, token)
    sections = config.model.model_dump_json(), config.engine.model_dump_json()
    info = RunInfo(identity.public_key, *sections, Sampling(1), None, adapters=True)
    numbers = NumberedWeights()
    async with run_server(config, token) as server:
        with registry(server, info, VersionServer(numbers, model_dir, identity), on_event):
            trainers = partial(_joined_trainer, server) if config.cluster.trainer else None
            async with TinkerService(settings, on_step, numbers, trainers) as service:
                server.open(EngineRole, partial(_joined_engine, service.pool(name)))
                try:
                    with launched(config, lambda words: on_event("Ray", words)):
                        yield service, server.url
                finally:
                    server.close(EngineRole)


@asynccontextmanager
async def _joined_engine(pool: EnginePool, role: EngineRole, worker: LeasedWorker) -> AsyncIterator[None]:
    """Entered once clients sample from an engine, left once others answer its requests."""
    await pool.join(worker.name, PullingEngine(role.url, token=role.token))
    try:
        yield
    finally:
        await pool.leave(worker.name)


@asynccontextmanager
async def _joined_trainer(server: RunServer) -> AsyncIterator[TrainerProcess]:
    """Waits until a rank joins; leaving the block frees it, to join again without any model."""
    async with RankGroup(1).ranks(server) as ranks:
        yield TrainerProcess(ranks, advice="")
