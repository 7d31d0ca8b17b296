"""Virtual time: an event loop whose clock jumps to the next timer when nothing can run.

Code under it uses `asyncio.sleep` and `loop.time()` as usual. Calls for threads run at once, in the loop's thread. Code
must not wait for sockets or processes, which do not follow this clock.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

from shoal.run.standstill import waits

T = TypeVar("T")
Args = TypeVarTuple("Args")


class NothingCanHappen(Exception):
    """A deadlock: every task waits, and no timer is set. Names the tasks and the place of each wait."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that starts at second 0; callbacks due at one moment run in the order of their scheduling."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.thread_s: Callable[[], float] = lambda: 0.0
        """Returns the seconds that the next call for a thread takes."""
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[[Unpack[Args]], T], *args: *Args) -> asyncio.Future[T]:
        """Calls a function in the loop's thread, after `thread_s` seconds."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # as a pool of threads hands it over
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        if (seconds := self.thread_s()) > 0:
            self.call_later(seconds, work)
        else:
            work()
        return future

    def jump(self, seconds: float | None) -> None:
        """Goes on to the next timer. Raises `NothingCanHappen` without a timer."""
        if seconds is None:
            raise NothingCanHappen("; ".join(waits(self)))
        self._now_s += max(seconds, 0.0)

    def turned(self) -> None:
        """Is called before each turn of the loop; subclasses end the loop here by an exception."""


class _Jumping(selectors.DefaultSelector):
    """Selector that polls instead of waiting, and sets the loop's clock to the time of its wake-up."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self._loop.turned()
        if not ready:
            self._loop.jump(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end under a separate clock. Raises `NothingCanHappen` at a deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
