"""Cancellation at each turn of the event loop, and what it leaves behind."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
TURNS = 12
"""Turns of an event loop in which a process has been started and its socket connected."""


def own_children() -> list[int]:
    """Ids of the processes that this process started and has not waited for."""
    found: list[int] = []
    for one in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread that waited for a child ends with it
            found += map(int, one.read_text().split())
    return found


def left_by(life: Callable[[], Coroutine[object, object, None]], loop: Loop, cancels: int) -> dict[int, list[int]]:
    """Children that a life leaves by the turn at which it is cancelled, once per turn from then on."""
    before = own_children()

    async def cancelled_after(turns: int) -> list[int]:
        living = asyncio.ensure_future(life())
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(cancels):
            living.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([living])
        return [pid for pid in own_children() if pid not in before]

    with asyncio.Runner(loop_factory=loop) as runner:
        return {turns: left for turns in range(TURNS) if (left := runner.run(cancelled_after(turns)))}
