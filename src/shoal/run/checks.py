"""Checks refuse a run before it writes or starts anything; a dry run makes them too."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from shoal import checker
from shoal.checker import leaves, task_spec
from shoal.config import Config
from shoal.config.presets import PRESETS
from shoal.errors import ConfigError, TaskError, without_credentials
from shoal.interfaces import Environment
from shoal.net.listening import listening_socket
from shoal.observe.trackers import PROMETHEUS, checked_tracker
from shoal.reward.user_functions import FunctionScorer
from shoal.run.run_dir import check_run_dir
from shoal.swarm.strategy.choice import sharer_of, taker_of
from shoal.swarm.wire.options import NatsOptions
from shoal.tasks.sdk import Definition
from shoal.types import RewardStatus, Split

REACH_S = 5.0
"""Seconds in which a server must take a connection."""
PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443, "nats": 4222, "tls": 4222}
"""Ports of URLs that name none."""


def check_start(config: Config, *, resume: bool = False) -> None:
    """Raises a `ShoalError` for a run that cannot begin with any model and tasks."""
    swarm = config.swarm
    sharer_of(swarm.share), taker_of(swarm.take)
    if swarm.servers:
        NatsOptions(swarm.servers, swarm.name)
    elif swarm.external_groups:
        preset = PRESETS.get(config.preset or "", {}).get("swarm.external_groups")
        is_preset = preset is not None and preset.value == swarm.external_groups
        by = f'preset = "{config.preset}" sets {swarm.external_groups}; ' if is_preset else ""
        raise ConfigError(
            f"swarm.external_groups: {by}peers' groups need swarm.servers to come from. "
            "Name servers, or set swarm.external_groups to 0 to train alone"
        )
    for text in config.metrics.trackers:
        if checked_tracker(text) == PROMETHEUS:
            try:
                listening_socket("127.0.0.1", int(text.partition(":")[2])).close()
            except ConfigError as error:
                raise ConfigError(f"metrics.trackers: {text}: {error}") from None
    check_run_dir(Path(config.run_dir), resume=resume)


async def check_functions(services: Sequence[Environment], answers: int) -> None:
    """Has each reward function score one row's truth, repeated to a group's size, in a separate process.

    Raises `ConfigError` with the cause.
    """
    scorer = FunctionScorer()
    try:
        for service in (one for one in services if not (one.converses or one.scores)):
            task = service.draw(Split.TRAIN, 0)
            for spec in leaves(task_spec(task)):
                if isinstance(spec, checker.Function):
                    await scorer.values(spec, task, [task.answer or ""] * answers)
    except (TaskError, TimeoutError) as error:
        raise ConfigError(f"tasks.{service.name}.scorer: expected rewards of one row's answers, got {error}") from None
    finally:
        await scorer.aclose()


async def check_urls(config: Config, services: Sequence[Environment]) -> dict[str, str]:
    """Tries to connect to each server of the settings. Returns the failures that a run gets along with, by URL.

    Raises `ConfigError` where none of `engine.urls` or of `reward.urls` is reached, or a judging model is not.
    """
    specs = [spec for one in services if not (one.converses or one.scores) for spec in leaves(_first_spec(one))]
    judges = [spec.url for spec in specs if isinstance(spec, checker.LLMJudge)]
    needed = [("engine.urls", config.engine.urls), ("reward.urls", config.reward.urls)]
    needed += [("scorer.url", [url]) for url in dict.fromkeys(judges)]
    unreached: dict[str, str] = {}
    for setting, urls in needed:
        failures = await _failures(urls)
        if urls and len(failures) == len(urls):
            url, why = next(iter(failures.items()))
            raise ConfigError(f"{setting}: expected a server that can be reached at {url}, got: {why}")
        unreached |= failures
    return unreached | await _failures(config.swarm.servers)


def _first_spec(service: Environment) -> checker.Spec:
    return task_spec(service.draw(Split.TRAIN, 0))


async def _failures(urls: Sequence[str]) -> dict[str, str]:
    """Why servers cannot be connected to, by URL; without those that can."""

    async def failure(url: str) -> str:
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or PORTS[parts.scheme])
        except TimeoutError:
            return f"no answer within {REACH_S:g} s"
        except OSError as error:
            # asyncio's text names the address once more; names that are not found have numbers below 0.
            return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        writer.close()
        return ""

    found = zip(urls, await asyncio.gather(*map(failure, urls)), strict=True)
    return {without_credentials(url): why for url, why in found if why}


async def check_scores(services: Sequence[Environment], answers: int) -> None:
    """Has each task's own `score` judge one row's truth, given as often as a group has answers, in this process.

    Raises `ConfigError`.
    """
    for service in services:
        if isinstance(service, Definition) and service.scores:
            task = service.draw(Split.TRAIN, 0)
            rewards = await service.score(task, [task.answer or ""] * answers)
            if reward := next((one for one in rewards if one.status is not RewardStatus.SCORED), None):
                raise ConfigError(f"tasks.{service.name}: expected a score of one row, got {reward.evidence}")
