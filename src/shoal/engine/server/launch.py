"""Start of an engine process by its parent. Loads no torch."""

import secrets
from pathlib import Path
from typing import Self

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.server.http_client import HttpEngine
from shoal.net.process import Child, torch_environment

PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}
"""Compiled products that an engine keeps: four for each number of rows, and two of attention. With 128 it compiled
products of a small model again, in a tenth of its time."""


class EngineChild(Child):
    """Engine process. The parent sends the token of its routes over the socket, where no other process can read it."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._token = secrets.token_urlsafe(24)
        self.send(self._token.encode())
        return self

    async def serving(self, timeout_s: float) -> HttpEngine:
        """Waits until the engine serves, and returns its client. Raises `ChildDied`."""
        return HttpEngine((await self.ready(timeout_s)).decode(), token=self._token)


def engine_child(
    model_dir: Path,
    engine: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int | None,
    threads: int,
    log: Path,
    name: str = "engine",
    gpu: str | None = None,
    weights: Path | None = None,
    record_routing: bool = False,
) -> EngineChild:
    """Child that runs `python -m shoal.engine.server.http_server`.

    It loads weights from `model_dir` or below `weights`.

    `gpu` names the visible GPU, as in CUDA_VISIBLE_DEVICES; without it the child sees the GPUs of this process.
    """
    options = {
        "model": model_dir,
        "dtype": model.dtype,
        "device": model.device,
        "threads": threads,
        "max-running": engine.max_running,
        "on-update": engine.on_update,
        "max-model-len": max_model_len,
        "weights": weights,
    }
    arguments = ["--die-with-parent", *(f"--{name}={value}" for name, value in options.items() if value is not None)]
    arguments += ["--record-routing"] if record_routing else []
    environment = torch_environment(threads, [gpu] if gpu else []) | PRODUCTS
    return EngineChild(name, "shoal.engine.server.http_server", arguments, log, environment)
