"""Waiting for what happens elsewhere: for the event itself, never for a time in which it should have happened."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path


async def until(true: Callable[[], bool | Awaitable[bool]], most_s: float = 120) -> None:
    """Returns once a condition holds; `most_s` is for machines that are busy with other things."""
    async with asyncio.timeout(most_s):
        while True:
            holds = true()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
