"""`shoal serve tinker` answers the `tinker` package on this machine's models, and on roles of other hosts."""

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from shoal.cluster.rank_group import RankGroup
from shoal.cluster.registry import EngineRole, RunInfo
from shoal.config import Config, parse
from shoal.config.settings import EMBEDDED
from shoal.engine.pool.named_models import NumberedWeights
from shoal.errors import ConfigError
from shoal.net.listening import listening_socket
from shoal.net.run_server import RunServer
from shoal.net.server import guarded, serving, until_cancelled
from shoal.observe.metrics import JsonlTracker
from shoal.observe.runs import METRICS
from shoal.run.engines import joined_engine
from shoal.run.prepare import model_directory
from shoal.run.roles import kept_identity, launched, registry, run_server, run_token
from shoal.trainer.worker import TrainerProcess
from shoal.types import Sampling
from shoal.weights.serving import VersionServer

if TYPE_CHECKING:
    from shoal.tinker.models_trainer import ServerSettings
    from shoal.tinker.service import TinkerService

KEYS_VARIABLE = "TINKER_API_KEY"
KEY_BEGINS = "tml-"
"""The package refuses keys that begin otherwise."""


async def serve_tinker(
    models: Sequence[str],
    folder: Path,
    *,
    host: str,
    port: int,
    engines: int,
    threads: int,
    device: str,
    announce: Callable[[str, str, Sequence[str], str], None],
    on_event: Callable[[str, str], None],
    overrides: Sequence[str] = (),
) -> None:
    """Serves until it is cancelled. `announce` gets URL, key, model names, and where roles join.

    Each of `models` is a directory, a hub name or an embedded model, or NAME= and that. Clients use NAME, the option
    itself without it, and for an embedded model its directory. `overrides` are settings of `[cluster]`; `on_event` gets
    the name of each role and what became of it. Raises a `ShoalError`.
    """
    try:
        from shoal.tinker.app import TinkerApp
        from shoal.tinker.models_trainer import ServerSettings
        from shoal.tinker.service import TinkerService
    except ModuleNotFoundError as error:
        if error.name != "tinker":
            raise
        raise ConfigError("serve tinker: expected the package tinker; pip install 'shoal[tinker]' brings it") from None
    bases = dict(_named(model) for model in models)
    keys = tuple(filter(None, os.environ.get(KEYS_VARIABLE, "").split(","))) or (
        KEY_BEGINS + secrets.token_urlsafe(24),
    )
    settings = ServerSettings(bases, folder, engines, threads, device=device)
    cluster, on_step = cluster_config(settings, overrides), _shown(folder / "runs")
    with listening_socket(host, port) as listening:
        async with AsyncExitStack() as stack:
            roles_url = ""
            if cluster is not None:
                joining = joinable(cluster, settings, on_step, on_event)
                service, roles_url = await stack.enter_async_context(joining)
            else:
                service = await stack.enter_async_context(TinkerService(settings, on_step))
            app = guarded(TinkerApp(service, keys).app, media_type="", host=host)
            url = await stack.enter_async_context(serving(app, listening=listening, idle_s=120))
            announce(url, keys[0], tuple(bases), roles_url)
            await until_cancelled()


def _shown(folder: Path) -> Callable[[str, int, Mapping[str, float]], None]:
    """Each model's steps as a separate run directory, for `shoal view`."""
    trackers: dict[str, JsonlTracker] = {}

    def on_step(model: str, step: int, values: Mapping[str, float]) -> None:
        if model not in trackers:
            run_dir = folder / model.replace(":", "-")
            run_dir.mkdir(parents=True, exist_ok=True)
            trackers[model] = JsonlTracker(run_dir / METRICS)
        trackers[model].log(step, values)

    return on_step


def _named(model: str) -> tuple[str, Path]:
    name, mark, path = model.partition("=")
    directory = model_directory(path if mark else model)
    return name if mark else str(directory) if model in EMBEDDED else model, directory


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
                server.open(EngineRole, partial(joined_engine, service.pool(name)))
                try:
                    with launched(config, token, lambda words: on_event("Ray", words)):
                        yield service, server.url
                finally:
                    server.close(EngineRole)


@asynccontextmanager
async def _joined_trainer(server: RunServer) -> AsyncIterator[TrainerProcess]:
    """Waits until a rank joins; leaving the block frees it, to join again without any model."""
    async with RankGroup(1).ranks(server) as ranks:
        yield TrainerProcess(ranks)
