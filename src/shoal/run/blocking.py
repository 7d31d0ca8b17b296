"""Coroutines run to their end from plain code, in a notebook too, whose thread runs an event loop already."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns its result: here, or in a thread where this one has a running event loop.

    An interrupt cancels the coroutine and waits for its end, as Ctrl-C does.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return uvloop.run(coroutine)
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def tracked() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1, "shoal") as pool:
        running = pool.submit(uvloop.run, tracked())
        try:
            return running.result()
        except KeyboardInterrupt:
            loop, task = begun.result()
            loop.call_soon_threadsafe(task.cancel)
            raise
