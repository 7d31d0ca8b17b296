"""A standstill is an event: it names the waits and the action taken, and ends the run when nothing helps."""

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import StoodStill

CHECKS = 8
"""Checks of progress within the time that a run may stand still."""
FRUITLESS = 3
"""Standstills in a row without a possible action, after which a run ends."""
STANDSTILLS = 10
"""Consecutive standstills after which a run ends in any case."""
LONGEST_WAITS = 2000


async def watch_progress(
    progress: Callable[[], Hashable],
    help_up: Callable[[], Awaitable[list[str]]],
    report: Callable[[str], None],
    stall_s: float,
) -> None:
    """Watches `progress` until cancelled; after `stall_s` without any, acts and reports the action.

    Raises `StoodStill` after too many standstills in a row.
    """
    loop = asyncio.get_running_loop()
    seen, since_s, acted_s, fruitless, standstills = progress(), loop.time(), loop.time(), 0, 0
    while True:
        await asyncio.sleep(stall_s / CHECKS)
        now = progress()
        if now != seen:
            seen, since_s, acted_s, fruitless, standstills = now, loop.time(), loop.time(), 0, 0
            continue
        if loop.time() - acted_s < stall_s:
            continue
        still_s = loop.time() - since_s
        waiting = "; ".join(waits(loop))[:LONGEST_WAITS]
        helped = await help_up()
        what = ", ".join(helped) if helped else "nothing was found that would help"
        report(f"nothing has moved for {still_s:.0f} s; {what}; {waiting}")
        acted_s = loop.time()
        standstills += 1
        fruitless = 0 if helped else fruitless + 1
        if fruitless == FRUITLESS or standstills == STANDSTILLS:
            raise StoodStill(f"nothing has moved for {still_s:.0f} s; {what}")


@contextmanager
def report_waits() -> Iterator[None]:
    """Answers SIGUSR1 within the block. Signals reach the main thread only, so elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: sys.stderr.write("\n".join(waits(loop)) + "\n"))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


def waits(loop: asyncio.AbstractEventLoop) -> list[str]:
    """A line for each task of a loop, by name, with the place where it waits."""
    return sorted(_whereabouts(task) for task in asyncio.all_tasks(loop))


def _whereabouts(task: "asyncio.Task[Any]") -> str:
    """The innermost line of a task's coroutine, and the awaited object there."""
    inner: Any = task.get_coro()
    place = "nowhere"
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        inner = inner.cr_await
    return f"{task.get_name()} waits in {place}" + (f" for {type(inner).__name__}" if inner is not None else "")
