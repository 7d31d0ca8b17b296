"""Time that jumps: an event loop for simulations and tests, in which waiting takes no time at all.

When nothing can run, the clock is set to the moment at which the next timer is due. Code under it uses `asyncio.sleep`
and `loop.time()` as ever; it must not wait for threads, sockets or processes, which know nothing of this clock.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.run.standstill import waits

T = TypeVar("T")


class NothingCanHappen(Exception):
    """Every task waits, and no timer will ever wake one: a deadlock. Names the tasks and where each waits."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at second 0; callbacks due at one moment run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float | None) -> None:
        """Goes on to the next timer. Raises `NothingCanHappen` when there is none."""
        if seconds is None:
            raise NothingCanHappen("; ".join(waits(self)))
        self._now_s += max(seconds, 0.0)


class _Jumping(selectors.DefaultSelector):
    """Polls instead of waiting, and sets the loop's clock to when it would have woken up."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            self._loop.jump(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end under a clock of its own. Raises `NothingCanHappen` at a deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
