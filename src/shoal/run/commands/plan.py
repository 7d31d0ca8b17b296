"""`shoal train --dry-run` describes a run after all its checks, and tries to reach its servers."""

import asyncio
import os
from collections.abc import Sequence
from functools import reduce
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from shoal import checker
from shoal.checker import leaves, task_spec
from shoal.config import Config
from shoal.config.presets import PRESETS
from shoal.errors import ConfigError, without_credentials
from shoal.interfaces import Environment
from shoal.model.file_sizes import shapes_of
from shoal.run.blocking import run_blocking
from shoal.run.machine.devices import gpu_bytes
from shoal.run.machine.memory import engine_bytes, fitted, memory_of_gpu, trainer_mesh
from shoal.run.prepare import Prepared, check_start, prepare
from shoal.run.run_dir import own_mathematics
from shoal.tasks.jsonl import rows_of
from shoal.trainer.advantage import own_advantage
from shoal.types import Split

REACH_S = 5.0
"""Seconds in which a server must take a connection."""
PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443, "nats": 4222, "tls": 4222}
"""Ports of URLs that name none."""


def plan(config: Config, *, resume: bool = False, gpu: str = "") -> dict[str, object]:
    """Describes a run for `--dry-run`, on the machine's GPUs or those with the name `gpu`. Raises the run's errors."""
    memory = memory_of_gpu(gpu) if gpu else gpu_bytes()
    check_start(config, resume=resume)
    for setting, name in own_mathematics(config).items():
        if setting == "train.loss":
            from shoal.trainer.loss import own_loss  # loads torch

            own_loss(name)
        else:
            own_advantage(name)
    for stage in config.stages:
        for _ in rows_of(Path(stage.data)) if stage.data else ():
            pass  # a file that cannot be read would end the run when its stage begins
    with prepare(config, dry=True) as prepared:
        unreached = run_blocking(check_urls(config, list(prepared.environments.values())))
        given = {f"not reached: {url}": why for url, why in unreached.items()}
        return {**_described(prepared, memory if gpu or prepared.devices.ranks else 0), **given}


def _described(prepared: Prepared, memory: int) -> dict[str, object]:
    config = prepared.config
    rows = config.train.groups_per_step * config.rollout.group_size
    shapes = shapes_of(prepared.model_dir)
    stages = [config.stage(index) for index in range(len(config.stages))] or [config]
    largest = max(stages, key=lambda stage: trainer_mesh(stage, shapes, memory).state_bytes)
    mesh = trainer_mesh(largest, shapes, memory)
    engine = engine_bytes(config, prepared.model_dir, prepared.row_tokens)
    fit = fitted(largest, prepared.model_dir, mesh, prepared.row_tokens, memory)[1] if memory else None
    settings = config.model_dump(mode="json")
    preset = {
        f"{config.preset}: {key}": reduce(lambda node, part: node[part], key.split("."), settings)
        for key in PRESETS.get(config.preset or "", {})
    }
    bound = config.asynchrony.max_staleness
    return {
        "model": str(prepared.model_dir),
        "parameters": sum(map(prod, shapes.values())),
        "tasks": ", ".join(task.name for task in config.tasks),
        "steps": config.train.steps,
        "rollouts_per_step": rows,
        "tokens_per_step_at_most": rows * prepared.row_tokens,
        "engine_memory_mb": round(sum(engine.values()) / 1e6, 1),
        "trainer_memory_mb": round(mesh.state_bytes / mesh.shard / 1e6, 1),
        "memory_mb": {"engine": {part: round(size / 1e6, 1) for part, size in engine.items()}},
        "mesh": str(mesh),
        **({"gpu_memory": str(fit)} if fit is not None else {}),
        "staleness_bound": bound,
        "staleness_expected": f"about {bound} if the trainer is slower than the engines, below 1 if it is faster"
        if bound
        else "0: generation and training take turns",
        "devices": str(prepared.devices),
        "run_dir": config.run_dir,
        **preset,
    }


async def check_urls(config: Config, services: Sequence[Environment]) -> dict[str, str]:
    """Tries to connect to each server of the settings. Returns the failures that a run gets along with, by URL.

    Raises `ConfigError` where none of `engine.urls` is reached, or a judging model is not.
    """
    asked = [one.draw(Split.TRAIN, 0) for one in services if not (one.converses or one.scores)]
    specs = [spec for task in asked for spec in leaves(task_spec(task))]
    judges = [spec.url for spec in specs if isinstance(spec, checker.LLMJudge)]
    needed = [("engine.urls", config.engine.urls), *(("scorer.url", [url]) for url in dict.fromkeys(judges))]
    unreached: dict[str, str] = {}
    for setting, urls in needed:
        failures = await _failures(urls)
        if urls and len(failures) == len(urls):
            url, why = next(iter(failures.items()))
            raise ConfigError(f"{setting}: expected a server that can be reached at {url}, got: {why}")
        unreached |= failures
    return unreached | await _failures(config.swarm.servers)


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
