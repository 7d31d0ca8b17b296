"""Writes to the log from its own thread, so that no disk ever blocks the event loop."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, TypeVar

from shoal.errors import RunDirError
from shoal.experience.log import LockedLog, is_locked

T = TypeVar("T")

LOCK_TIMEOUT_S = 1.0
"""Seconds that one attempt to write waits for another program's lock; attempts go on until the log is closed."""
POST_DELAY_S = 0.02
"""Longest wait of a write that has no waiter, so that many share a commit, which costs more than they do."""
MAX_BATCH = 256
"""Most writes per transaction: enough to share a commit, few enough to keep its latency low."""


@dataclass(slots=True)
class _Write:
    """One write and the future of its result."""

    run: Callable[[sqlite3.Connection], Any]
    arrived: Callable[[Any], None]
    future: asyncio.Future[Any]
    alone: bool
    """True if the write is in no transaction."""
    result: object = None

    def do(self, connection: sqlite3.Connection) -> None:
        """Runs the write and keeps its result."""
        self.result = self.run(connection)


class LogWriter:
    """Runs writes in the order of their requests, several to a transaction, and notifies the loop when they are
    durable.

    Invariant: `arrived` callbacks run on the event loop, in commit order, after the commit. After one failure nothing
    more is written: every later write fails with an equal error, and `on_failure` receives the first.

    The writer waits for another program's lock on the log without end; `on_locked` receives its begin (True) and end
    (False).

    The queue holds at most the turns of running groups and a few writes per group, so the admission gate bounds it.
    With `threaded=False` each write happens at once on the caller's thread, which a virtual clock needs.
    """

    def __init__(self, log: LockedLog, *, on_failure: Callable[[Exception], None], threaded: bool = True) -> None:
        self._log = log
        self._on_failure = on_failure
        self.on_locked: Callable[[bool], None] = lambda locked: None
        self._closing = threading.Event()
        log.connection.execute(f"PRAGMA busy_timeout={int(LOCK_TIMEOUT_S * 1000)}")
        self._failure: Exception | None = None
        self._asked: list[_Write] = []
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "log-writer") if threaded else None

    def post(self, run: Callable[[sqlite3.Connection], object]) -> None:
        """Requests a write without waiting for it. A later request is never durable earlier."""

        def write(connection: sqlite3.Connection) -> None:
            run(connection)  # a cursor that the loop's thread freed would reset the statement of the next write

        self._ask(write, delay_s=POST_DELAY_S).add_done_callback(lambda done: done.exception())  # see `on_failure`

    async def commit(
        self, run: Callable[[sqlite3.Connection], T], arrived: Callable[[T], None] = lambda result: None
    ) -> T:
        """Awaits the result of a durable write. Raises `RunDirError` when the log cannot be written."""
        return await self._ask(run, arrived)

    async def alone(self, run: Callable[[sqlite3.Connection], T]) -> T:
        """Awaits the result of a call between two transactions. Raises `RunDirError` when the log cannot be written."""
        return await self._ask(run, alone=True)

    async def sync(self) -> None:
        """Returns when all commits survive also the loss of power, and of the -wal file."""
        await self.alone(lambda _: self._log.sync())

    async def close(self) -> None:
        """Waits for pending writes, but for no other program's lock, and closes the log."""
        self._closing.set()
        if self._asked:
            self._begin()
        if self._working is not None:
            await self._working
        if self._thread is not None:
            self._thread.shutdown()
        self._log.close()

    def _ask(
        self,
        run: Callable[[sqlite3.Connection], T],
        arrived: Callable[[T], None] = lambda result: None,
        *,
        alone: bool = False,
        delay_s: float = 0.0,
    ) -> asyncio.Future[T]:
        self._loop = asyncio.get_running_loop()
        write = _Write(run, arrived, self._loop.create_future(), alone)
        if self._failure is not None:
            write.future.set_exception(self._failure)
        elif self._thread is None:
            self._deliver([write], self._commit_batch([write]))
        else:
            self._asked.append(write)
            if not delay_s:
                self._begin()
            elif len(self._asked) == 1:
                self._loop.call_later(delay_s, self._begin)
        return write.future

    def _begin(self) -> None:
        """Starts to work unless that is under way, or all is done."""
        if self._thread is not None and self._asked and (self._working is None or self._working.done()):
            self._working = self._loop.create_task(self._work(self._thread))

    async def _work(self, thread: ThreadPoolExecutor) -> None:
        """Makes all requested writes one transaction at a time, except calls between two transactions."""
        while self._asked:
            _, alike = next(groupby(self._asked, attrgetter("alone")))
            batch = list(islice(alike, MAX_BATCH))
            del self._asked[: len(batch)]
            self._deliver(batch, await self._loop.run_in_executor(thread, self._commit_batch, batch))

    def _when_unlocked(self, run: Callable[[], object]) -> None:
        """Calls a function as soon as no other program writes."""
        waiting = False
        while True:
            try:
                run()
                break
            except sqlite3.OperationalError as error:
                if not is_locked(error) or self._closing.is_set():
                    raise
            if not waiting:
                waiting = True
                self._loop.call_soon_threadsafe(self.on_locked, True)
        if waiting:
            self._loop.call_soon_threadsafe(self.on_locked, False)

    def _commit_batch(self, writes: Sequence[_Write]) -> Exception | None:
        """Runs writes as one transaction: all are durable afterwards, or none and the reason is returned."""
        if self._failure is not None:
            return self._failure
        connection = self._log.connection
        try:
            if not writes[0].alone:
                self._when_unlocked(partial(connection.execute, "BEGIN IMMEDIATE"))
            for write in writes:
                if write.alone:
                    self._when_unlocked(partial(write.do, connection))
                else:
                    write.do(connection)
            if connection.in_transaction:
                connection.execute("COMMIT")
        except Exception as error:  # a caller awaits this write and must receive any error
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._failure = error
            if isinstance(error, sqlite3.OperationalError | OSError):
                what = "end the program that locks it" if is_locked(error) else "free space"
                self._failure = RunDirError(f"{self._log.path} cannot be written: {error}; {what}, then --resume")
                self._failure.__cause__ = error
        return self._failure

    def _deliver(self, writes: Sequence[_Write], failure: Exception | None) -> None:
        for write in writes:
            if failure is None:
                write.arrived(write.result)
            if not write.future.done():
                if failure is None:
                    write.future.set_result(write.result)
                else:
                    write.future.set_exception(failure)
        if failure is not None:
            self._on_failure(failure)
