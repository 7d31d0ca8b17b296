"""The thread in which an engine computes, and what passes between it and the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.interfaces import ServedToken, ServedTokens

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


class TokenStream:
    """The tokens of a request's one completion, some at a time."""

    def __init__(self, request: Request, every: int) -> None:
        """`every` is the least number of tokens at a time until the last; 0 gives them all at once."""
        self.request = request
        self.ended = False
        """Whether `news` has given the last tokens."""
        self._every = every
        self._seen = 0
        self.queue: asyncio.Queue[ServedTokens] = asyncio.Queue()
        """Tokens for the event loop; the last ones have a finish reason."""

    def news(self) -> ServedTokens | None:
        """The tokens since the last call, if they are enough or the last; for the engine's thread, after a step."""
        if self.ended or not self.request.drafts:
            return None
        (draft,), seen = self.request.drafts, self._seen
        self.ended = draft.finish_reason is not None
        if not self.ended and (not self._every or len(draft.sampled) - seen < self._every):
            return None
        rows = zip(draft.sampled[seen:], draft.logprobs[seen:], draft.tops[seen:], strict=True)
        self._seen = len(draft.sampled)
        return ServedTokens(tuple(ServedToken(*row) for row in rows), draft.finish_reason)


def pass_on(news: Iterable[tuple[TokenStream, ServedTokens]]) -> None:
    """Hands each stream its tokens; on the event loop."""
    for stream, tokens in news:
        stream.queue.put_nowait(tokens)
