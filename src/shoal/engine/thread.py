"""Thread that steps the engine, and calls from other threads between two steps."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shoal.engine.request import Request
from shoal.engine.step_engine import StepEngine

T = TypeVar("T")


class EngineThread:
    """Steps an engine whenever it has work, and sleeps otherwise.

    The thread calls `deliver` after each step with the requests that ended; it must return soon. The thread calls
    `crashed` when a step raises, by a bug or lack of memory: the engine cannot continue.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        deliver: Callable[[list[Request]], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._crashed = crashed
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._turned_s: float | None = None  # start of the current turn; None while the thread sleeps
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def turn_s(self) -> float:
        """Seconds in the current step and the calls before it; 0 while the thread sleeps."""
        turned_s = self._turned_s
        return 0.0 if turned_s is None else time.monotonic() - turned_s

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Calls `function` between two steps; the future has its result, or its error, which only the caller sees."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # of one request: raised here, it would end the engine for all
                future.set_exception(error)

        self._commands.append(command)
        self._wake.set()
        return future

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._turned_s = time.monotonic()
                while self._commands:
                    self._commands.popleft()()
                if self._engine.idle:
                    self._turned_s = None
                    self._wake.wait()
                else:
                    self._deliver(self._engine.step())
        except BaseException as error:
            self._crashed(error)
            raise


async def result(future: "Future[T]") -> T:
    """Awaits a future that another thread completes. Cancelling the await does not cancel the future."""
    return await asyncio.shield(asyncio.wrap_future(future))
