"""Futures of stored requests: results that clients wait for, and errors that are a request's own."""

import asyncio
import sqlite3
import sys
import traceback
from typing import TypeVar

import msgspec

from shoal.errors import RequestRefused, ShoalError
from shoal.net.server import Refused
from shoal.tinker.store import Store, StoredRequest

T = TypeVar("T")
ROOM_CHECK_S = 1.0
"""Seconds between two attempts to store a failure on a full disk."""


class Futures:
    """Results of requests, stored before clients are notified."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._resolved: dict[str, asyncio.Event] = {}

    async def result(self, id_: str, timeout_s: float) -> StoredRequest | None:
        """A request with its result, or still pending after the timeout; None for an unknown id."""
        request = self._store.request(id_)
        if request is not None and request.state == "pending":
            event = self._resolved.setdefault(id_, asyncio.Event())
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                return request
            request = self._store.request(id_)
        return request

    async def resolve(self, request: StoredRequest, result: bytes | Exception, *, repeats: bool = False) -> None:
        """Ends a request with its result or its error; a model whose creation failed is closed.

        A restart `repeats` the request. A result that finds no room on the disk raises `sqlite3.OperationalError`. An
        error waits for room: what the store does not hold, a restart would not know. Raises `RunDirError` when the
        store can never be written.
        """
        if isinstance(result, bytes):
            self._store.resolve(request.id, result, repeats=repeats)
        else:
            why = str(result)
            if not isinstance(result, ShoalError):
                traceback.print_exception(result, file=sys.stderr)  # our own bug: the log keeps where
                why = f"{type(result).__name__}: {result}"
            category = "user" if isinstance(result, RequestRefused | Refused) else "server"
            await self._fail(request, msgspec.json.encode({"error": why, "category": category}))
        self.set(request.id)

    async def _fail(self, request: StoredRequest, failure: bytes) -> None:
        while True:
            try:
                with self._store.together():
                    self._store.resolve(request.id, failure, failed=True)
                    if request.kind == "create":
                        self._store.close_model(request.target)
                    elif request.kind == "optim_step":
                        self._store.drop_gradient(request)
                return
            except sqlite3.Error as error:
                self._store.check_passes(error)
            await asyncio.sleep(ROOM_CHECK_S)

    def set(self, id_: str) -> None:
        """Wakes the waiters of a request whose result is stored."""
        self._resolved.pop(id_, asyncio.Event()).set()


def stored(request: StoredRequest, kind: type[T]) -> T:
    """Stored body of a request. Raises `RequestRefused` for a body that cannot be read."""
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RequestRefused(f"{request.kind}: the stored request cannot be read: {error}") from None
