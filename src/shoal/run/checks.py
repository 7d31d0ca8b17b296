"""Checks refuse a run before it writes or starts anything; a dry run makes them too."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from shoal.config import Config
from shoal.errors import ConfigError, RunDirError
from shoal.net.listening import listening_socket
from shoal.swarm.options import NatsOptions
from shoal.swarm.strategy import sharer_of, taker_of

EXTRAS = {"metrics.tensorboard": "tensorboard", "metrics.wandb_project": "wandb", "train.lora.rank": "peft"}
"""Package that each of these settings needs."""
PACKAGE_EXTRAS = {"peft": "lora"}


def check_start(config: Config, *, resume: bool = False) -> None:
    """Raises a `ShoalError` for a run that cannot begin, whatever its model and tasks."""
    check_membership(config)
    _check_packages(config)
    _check_ports(config)
    check_run_dir(Path(config.run_dir), resume=resume)


def check_membership(config: Config) -> None:
    """Raises `ConfigError` for settings that no swarm could fulfil."""
    settings = config.swarm
    sharer_of(settings.share), taker_of(settings.take)
    if settings.servers:
        NatsOptions(settings.servers, settings.name)
    elif settings.external_groups:
        raise ConfigError("swarm.external_groups: peers' groups need swarm.servers to come from")


def _check_packages(config: Config) -> None:
    wanted = {
        "metrics.tensorboard": config.metrics.tensorboard,
        "metrics.wandb_project": config.metrics.wandb_project is not None,
        "train.lora.rank": bool(config.train.lora.rank),
    }
    for setting, package in EXTRAS.items():
        if wanted[setting] and find_spec(package) is None:
            extra = PACKAGE_EXTRAS.get(package, package)
            raise ConfigError(f"{setting}: expected the package {package}; pip install 'shoal[{extra}]' brings it")


def _check_ports(config: Config) -> None:
    """Raises `ConfigError` for a port in use."""
    port = config.metrics.prometheus_port
    if port:
        try:
            listening_socket("127.0.0.1", port).close()
        except ConfigError as error:
            raise ConfigError(f"metrics.prometheus_{error}") from None


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """Raises `RunDirError` unless a run can be written (or resumed) there. Leaves nothing behind."""
    try:
        _check_run_dir(run_dir, resume=resume)
    except OSError as error:
        raise RunDirError(
            f"run_dir: expected a folder that can be made, got {str(run_dir)!r}: {error.strerror}"
        ) from None


def _check_run_dir(run_dir: Path, *, resume: bool) -> None:
    log = run_dir / "log.sqlite"
    if resume and not log.is_file():
        raise RunDirError(f"{run_dir} holds no run to resume: {log} does not exist")
    if not resume and run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise RunDirError(f"{run_dir} exists already; resume it with --resume or choose another run_dir")
    for inner in ("weights", "logs", "checkpoints", "swarm", "model"):
        if (run_dir / inner).exists() and not (run_dir / inner).is_dir():
            raise RunDirError(f"{run_dir / inner}: expected a folder, got a file; move it away")
    parent = run_dir
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise RunDirError(f"{run_dir} cannot be written: {parent} is no folder")
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent))
    except OSError as error:
        raise RunDirError(f"{run_dir} cannot be written: {error.strerror} in {parent}") from None
