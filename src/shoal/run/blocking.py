"""Coroutines run to their end from plain code, in a notebook too, whose thread runs an event loop already."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


END_S = 12.0
"""Seconds that a run has to end after a stop signal."""
SAVE_S = 15.0
"""Seconds that a run has to save after SIGTERM, before it is stopped: schedulers kill 30 s after this signal."""
SAVERS: list[Callable[[Callable[[], None]], None]] = []
INTERRUPTED = 130
"""Exit status of a process after a stop signal."""


def _force() -> None:
    """Ends this process, and with it its children."""
    os.write(sys.stderr.fileno(), f"shoal: not ended in {END_S:g} s, so killed; go on with --resume\n".encode())
    os._exit(INTERRUPTED)


@asynccontextmanager
async def saved_at_stop(save: Callable[[Callable[[], None]], None]) -> AsyncIterator[None]:
    """Within the block SIGTERM calls `save`, which saves and calls its argument; only then the work is cancelled."""
    SAVERS.append(save)
    try:
        yield
    finally:
        SAVERS.remove(save)


async def _interruptible(coroutine: Coroutine[Any, Any, T], timer: threading.Timer) -> T:
    """Result of a coroutine of the main thread, which SIGINT and SIGTERM cancel; they start the timer."""
    task, loop, stopped, saving = asyncio.current_task(), asyncio.get_running_loop(), False, False
    assert task is not None
    if threading.current_thread() is not threading.main_thread():
        return await coroutine

    def end() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            timer.start()
            task.cancel()

    def begin_to_save(save: Callable[[Callable[[], None]], None]) -> None:
        loop.call_later(SAVE_S, end)
        save(end)

    def stop(number: int, frame: object) -> None:
        nonlocal saving
        if number == signal.SIGTERM and SAVERS and not saving:
            saving = True
            loop.call_soon_threadsafe(begin_to_save, SAVERS[-1])
        else:
            loop.call_soon_threadsafe(end)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return await coroutine
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns its result: here, or in a thread where this one has a running event loop.

    Ctrl-C and SIGTERM, after `saved_at_stop`, cancel the coroutine and raise `KeyboardInterrupt` after its end. What
    has not ended `END_S` after them is stopped or gone, and ends with this process.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        timer = threading.Timer(END_S, _force)
        timer.daemon = True
        try:
            return uvloop.run(_interruptible(coroutine, timer))
        finally:  # the end of the event loop waits for its threads
            timer.cancel()
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
