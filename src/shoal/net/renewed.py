"""A child process that is replaced by a new one after it has died or missed a deadline."""

import asyncio
from collections.abc import Callable

from shoal.errors import ChildDied
from shoal.net.process import Child

START_TIMEOUT_S = 900.0
"""Seconds until a start counts as hung: long, for busy machines; an exit is noticed at once."""


class RenewedChild:
    """Starts a child when it is first needed. Callers take turns. The child holds no state between two calls.

    Invariant: no answer to an earlier call is taken for that of a later one.
    """

    def __init__(self, made: Callable[[], Child]) -> None:
        """`made` gives a child that has not been started."""
        self._made = made
        self._turn = asyncio.Lock()
        self._child: Child | None = None
        self._is_ready = self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without a child."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Starts a child, which may still be getting ready afterwards."""
        self._child, self._is_ready = await self._made().__aenter__(), False

    async def call(self, frame: bytes, timeout_s: float) -> bytes:
        """The answer to a frame, from a second child if the first dies. Raises `TimeoutError` and `ChildDied`."""
        async with self._turn:
            try:
                return await self._answer(frame, timeout_s)
            except ChildDied:
                return await self._answer(frame, timeout_s)

    async def _answer(self, frame: bytes, timeout_s: float) -> bytes:
        try:
            if self._child is None and not self._closed:
                await self.start()
            if self._child is None or self._closed:
                raise ChildDied("closed")
            if not self._is_ready:
                await self._child.ready(START_TIMEOUT_S)
                self._is_ready = True
            return await self._child.call(frame, timeout_s)
        except BaseException:
            await self._end()
            raise

    async def close(self) -> None:
        """Ends the child at once, also in the middle of a call, which raises `ChildDied`. No other child starts."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.end()
