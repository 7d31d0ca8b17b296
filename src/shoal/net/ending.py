"""Waits that a cancellation does not cut short: for the end of a process, and for work that is under way."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def ended(
    process: asyncio.subprocess.Process,
    kill: Callable[[], None],
    grace_s: float,
    *,
    hurry: Callable[[], None] = lambda: None,
) -> None:
    """Waits for a process to end; kills it after `grace_s`, and waits as long again.

    A cancellation calls `hurry`, and takes effect after the wait. The wait runs in the caller's task: an event loop
    that ends cancels all others, and after closing it would not see the process end.
    """
    cancelled = None
    clock = asyncio.get_running_loop().time
    until = [clock() + grace_s * n for n in (2, 1)]
    while process.returncode is None and until:
        try:
            async with asyncio.timeout_at(until[-1]):
                await process.wait()
        except TimeoutError:
            until.pop()
            kill()
        except asyncio.CancelledError as error:
            cancelled = error
            hurry()
    if cancelled is not None:
        raise cancelled


async def settled(work: asyncio.Future[T]) -> T:
    """Result of the work; a cancellation takes effect once the work is done."""
    cancelled = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    result = work.result()
    if cancelled is not None:
        raise cancelled
    return result
