"""The thread in which an engine computes, and the way for others to have something done between two steps."""

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

    `deliver` is called in the thread after each step with the requests that it ended; it must return soon. `crashed` is
    called in the thread when a step raises, which is a bug or a lack of memory: the engine cannot go on.
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
        self._turned_s: float | None = None  # when it came to what it is at; None while it sleeps
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to step."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def turn_s(self) -> float:
        """For how long it has been at one step and the calls before it; 0 while it has nothing to do."""
        turned_s = self._turned_s
        return 0.0 if turned_s is None else time.monotonic() - turned_s

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Has `function` called between two steps; its result, or what it raises, which is the caller's alone."""
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
    """What another thread will say. Who is cancelled while waiting leaves the future as it is: it is set later."""
    return await asyncio.shield(asyncio.wrap_future(future))
