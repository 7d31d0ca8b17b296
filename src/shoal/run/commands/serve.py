"""`shoal serve` answers clients with a model: a separate engine, and the gateway before it.

While a new Version is promoted, there are two engines.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from random import SystemRandom
from string import printable
from typing import TYPE_CHECKING

from pydantic import JsonValue

from shoal.cluster.rank_group import RankGroup
from shoal.cluster.registry import EngineRole, RunInfo
from shoal.config import Config, EngineConfig, ModelConfig, parse
from shoal.config.settings import EMBEDDED
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import NumberedWeights
from shoal.engine.server.http_client import EngineChild, HttpEngine, engine_child
from shoal.errors import ChildDied, ConfigError, ModelError, RunDirError, SessionError
from shoal.gateway.promotion import Promotion, Stage, Trial
from shoal.gateway.request_log import OnRequest
from shoal.gateway.server import Gateway
from shoal.interfaces import Renderer
from shoal.model.renderer_loading import load_renderer
from shoal.net.collection import collect_rarely
from shoal.net.listening import is_loopback, listening_socket
from shoal.net.run_server import RunServer
from shoal.net.server import guarded, serving, until_cancelled
from shoal.observe.metrics import METRICS, JsonlTracker
from shoal.run.engines import START_TIMEOUT_S, joined_engine
from shoal.run.prepare import model_directory
from shoal.run.roles import kept_identity, launched, registry, run_server, run_token
from shoal.trainer.worker import TrainerProcess
from shoal.types import Message, Role, Sampling
from shoal.weights.serving import VersionServer

if TYPE_CHECKING:
    from shoal.tinker.models_trainer import ServerSettings
    from shoal.tinker.service import TinkerService


ADMIN_KEY = "SHOAL_ADMIN_KEY"
OUTCOMES = "outcomes.sqlite"
PATIENCE_S = 10.0
"""Seconds for which a request waits for an engine that is full or gone."""


@asynccontextmanager
async def lone_engine(
    model_dir: Path, model: ModelConfig, threads: int
) -> AsyncIterator[tuple[EngineChild, HttpEngine]]:
    """Starts an engine process of a model; yields it with its client. Raises `ChildDied`."""
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as logs:
        log = Path(logs) / "engine.log"
        child = engine_child(model_dir, EngineConfig(), model, max_model_len=None, threads=threads, log=log)
        async with child, aclosing(await child.serving(START_TIMEOUT_S)) as engine:
            yield child, engine


async def serve(
    model: ModelConfig,
    *,
    promote: str = "",
    folder: Path,
    host: str,
    port: int,
    threads: int,
    announce: Callable[[str, str, str, bool], None],
    on_promotion: Callable[[str], None],
    on_request: OnRequest,
) -> None:
    """Serves OpenAI and Anthropic clients until it is cancelled. Raises a `ShoalError`.

    `promote` is a run or model whose Version goes to a growing share of the users; `folder` keeps their outcomes, and
    `on_promotion` gets its state at the start and at its end.

    `announce` gets URL, model name, API key and whether the model chats, once requests are answered. The key is empty
    on loopback; elsewhere it comes from the environment, or is new. `on_request` gets each request once it is answered.
    """
    admin_key = "" if is_loopback(host) else os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24)
    directory, name = chat_directory(model.path), _served_name(model.path)
    renderer = load_renderer(directory)
    try:
        renderer.prompt_ids([Message(Role.USER, "question")])
    except SessionError as error:
        raise ModelError(f"model {str(directory)!r} has a chat template that cannot be used: {error}") from error
    directories = [directory, *([_promoted(promote, directory, renderer)] if promote else [])]
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(listening_socket(host, port))
        started = [lone_engine(one, model, max(threads // len(directories), 1)) for one in directories]
        children, engines = zip(*[await stack.enter_async_context(one) for one in started], strict=True)
        pools, longest = [], []
        for engine in engines:
            pools.append(EnginePool(patience_s=PATIENCE_S))  # of one: it continues aborted answers
            await pools[-1].join("engine", engine)
            longest.append((await engine.info()).max_model_len)
        trial = None
        if promote:
            promotion = Promotion(folder / OUTCOMES, _pair(directories), SystemRandom(), on_promotion)
            stack.callback(promotion.close)
            trial = Trial(promotion, pools[1], engines[1])
            on_promotion(promotion.sentence)
        gateway = Gateway(
            pools[0],
            renderer,
            max_model_len=min(longest),
            model=name,
            also_called=(model.path,),
            model_server=engines[0],
            trial=trial,
            on_request=on_request,
            admin_key=admin_key,
            host=host,
        )
        collect_rarely()
        url = await stack.enter_async_context(serving(gateway.app, listening=listening))
        announce(url, name, admin_key, renderer.has_template)
        raise ChildDied(await _needed_died(children, trial))


async def _needed_died(children: Sequence[EngineChild], trial: Trial | None) -> str:
    """Waits until an engine that users need has ended; returns how. A trial without its new engine ends."""
    died = {asyncio.create_task(child.died(), name=f"end of engine {i}"): i for i, child in enumerate(children)}
    try:
        while True:
            ended, _ = await asyncio.wait(died, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                is_new, how = bool(died.pop(task)), str(task.result())
                if trial is None or is_new == (trial.promotion.stage is Stage.PROMOTED):
                    return how
                if trial.promotion.stage is Stage.TRIAL:
                    trial.promotion.lose(how)
    finally:
        for task in died:
            task.cancel()


def _promoted(path: str, old: Path, renderer: Renderer) -> Path:
    """Directory of the model to promote. Raises `ModelError` when it has other tokens than the old one's renderer."""
    new = chat_directory(path)
    if _spelt(load_renderer(new)) != _spelt(renderer):
        raise ModelError(f"--promote: expected a model with the tokenizer and chat template of {old}, got {new}")
    return new


def _spelt(renderer: Renderer) -> tuple[object, ...]:
    """Tokens of a conversation with all printable characters of ASCII, and those that end an answer."""
    asked = [Message(Role.SYSTEM, "terse"), Message(Role.USER, printable.strip())]
    return renderer.stop_token_ids, renderer.prompt_ids(asked)


def _pair(directories: Sequence[Path]) -> str:
    """Name of the old and the new weights. Other files at the same path make another promotion."""
    changed = [max((one.stat().st_mtime_ns for one in each.glob("*.safetensors")), default=0) for each in directories]
    return " -> ".join(f"{each.resolve()}@{at}" for each, at in zip(directories, changed, strict=True))


def chat_directory(path: str) -> Path:
    """Directory of the model of a run, or of a model by its path or name. Raises a `ShoalError`."""
    if any((Path(path) / name).exists() for name in (METRICS, "log.sqlite")):
        if not (Path(path) / "model").is_dir():
            raise RunDirError(f"{path} has no model yet: a run writes it when its last step is done")
        return Path(path) / "model"
    return model_directory(path)


def _served_name(path: str) -> str:
    """Name of a model for clients: its folder's or file's, or the given name."""
    given = Path(path).expanduser()
    return given.resolve().name if given.exists() and path not in EMBEDDED else path


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
