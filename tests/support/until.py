"""Waiting for what happens elsewhere: for the event itself, never for a time in which it should have happened."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(true: Callable[[], bool | Awaitable[bool]], most_s: float = 60) -> None:
    """Returns once a condition holds; `most_s` is for machines that are busy with other things."""
    async with asyncio.timeout(most_s):
        while True:
            holds = true()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.005)
