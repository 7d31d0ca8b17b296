"""`shoal serve tinker` answers the `tinker` package on this machine's models."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.config.settings import EMBEDDED
from shoal.errors import ConfigError
from shoal.net.listening import listening_socket
from shoal.net.server import guarded, serving, until_cancelled
from shoal.observe.metrics import JsonlTracker
from shoal.observe.runs import METRICS
from shoal.run.prepare import model_directory

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
        from shoal.run.commands.tinker_roles import cluster_config, joinable
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
