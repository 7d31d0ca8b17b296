"""A run that stands still: it is said, acted upon, and ended when nothing helps."""

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.server.http_client import engine_child
from shoal.errors import StoodStill
from shoal.rehearsal.clock import run_virtual
from shoal.run.engines import RunEngines
from shoal.run.standstill import FRUITLESS, STANDSTILLS, watch_progress
from shoal.types import Sampling


def test_a_run_that_moves_is_left_alone_and_one_that_stands_still_says_so_each_time_then_ends() -> None:
    told: list[tuple[float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def helped() -> list[str]:
            return ["engine was paused and is resumed"] if loop.time() < 1150 else []

        def tell(text: str) -> None:
            told.append((loop.time(), text))

        await watch_progress(lambda: min(loop.time(), 1000), helped, tell, stall_s=100)

    with pytest.raises(StoodStill, match=r"nothing has moved for 4\d\d s; nothing was found that would help"):
        run_virtual(main())
    assert [at > 1000 for at, _ in told] == [True] * (1 + FRUITLESS)
    assert "engine was paused and is resumed" in told[0][1]
    assert "waits in" in told[0][1]


def test_what_is_helped_again_and_again_without_any_progress_ends_as_well() -> None:
    told: list[str] = []

    async def helped() -> list[str]:
        return ["engine does not answer and is started again"]

    with pytest.raises(StoodStill, match="engine does not answer and is started again"):
        run_virtual(watch_progress(lambda: 0, helped, told.append, stall_s=100))
    assert len(told) == STANDSTILLS


def test_progress_in_between_begins_the_count_anew() -> None:
    told: list[str] = []

    async def helped() -> list[str]:
        return []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5000):  # moves every 250 s: two standstills each time
            await watch_progress(lambda: loop.time() // 250, helped, told.append, stall_s=100)

    with pytest.raises(TimeoutError):
        run_virtual(main())
    assert len(told) > 10


async def test_a_paused_engine_is_resumed_and_one_that_hangs_is_killed(tiny_model_dir: Path, tmp_path: Path) -> None:
    nothing: Any = None

    child = engine_child(
        tiny_model_dir, EngineConfig(), ModelConfig(), max_model_len=64, threads=1, log=tmp_path / "log"
    )
    async with child, aclosing(await child.serving(120)) as engine:
        own = RunEngines(nothing, nothing, print, running={"engine": (child, engine)})
        assert await own.helped() == []
        await engine.pause()
        assert await own.helped() == ["engine was paused and is resumed"]
        assert len(await engine.generate([5, 6], Sampling(3))) == 1
        os.kill(child.pid, signal.SIGSTOP)
        assert await own.helped(0.5) == ["engine does not answer and is started again"]
        assert (await child.died()).returncode == -signal.SIGKILL
