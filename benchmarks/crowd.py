"""The crowd sends many requests at once over HTTP, and measures the waits and the engine's memory."""

import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import psutil

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.server.http_client import HttpEngine, engine_child
from shoal.types import Sampling

Report = dict[str, object]
START_TIMEOUT_S = 120.0
WATCH_EVERY_S = 0.05


async def crowd(directory: Path, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Report:
    """Sends one engine process all prompts at once; answers have the given lengths, in tokens."""
    with tempfile.TemporaryDirectory() as folder:
        child = engine_child(
            directory, EngineConfig(), ModelConfig(), max_model_len=None, threads=1, log=Path(folder) / "engine.log"
        )
        async with child, aclosing(await child.serving(START_TIMEOUT_S)) as engine:
            process = psutil.Process(child.pid)
            idle_bytes = process.memory_info().rss
            watch = asyncio.create_task(_peak_bytes(process, done := asyncio.Event()))
            began_s = time.perf_counter()
            waits_s = await asyncio.gather(
                *(_wait_s(engine, prompt, length) for prompt, length in zip(prompts, lengths, strict=True))
            )
            seconds = time.perf_counter() - began_s
            done.set()
            peak_bytes = await watch
    answered = [wait_s for wait_s in waits_s if wait_s is not None]
    return {
        "requests": len(prompts),
        "answered": len(answered),
        "tokens_per_s": sum(lengths) / seconds,
        "wait_p50_s": quantile(answered, 0.5),
        "wait_p99_s": quantile(answered, 0.99),
        "memory_idle_megabytes": idle_bytes / 1e6,
        "memory_peak_megabytes": peak_bytes / 1e6,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least this share of the values does not exceed.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def _wait_s(engine: HttpEngine, prompt: Sequence[int], length: int) -> float | None:
    """Seconds until an answer was there; None for an incomplete answer."""
    began_s = time.perf_counter()
    (completion,) = await engine.generate(prompt, Sampling(length))
    return time.perf_counter() - began_s if len(completion.token_ids) == length else None


async def _peak_bytes(process: psutil.Process, done: asyncio.Event) -> int:
    peak = 0
    while not done.is_set():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(WATCH_EVERY_S)
    return peak
