"""The queue at the admission gate: first come, first served."""

import asyncio
from collections import deque

from shoal.experience.gate import AdmissionGate


class AdmissionQueue:
    """Lets callers through the gate in the order in which they came. One event loop."""

    def __init__(self, gate: AdmissionGate) -> None:
        self._gate = gate
        self._queue: deque[asyncio.Future[int]] = deque()

    async def place(self) -> int:
        """Waits for its turn and returns the Version under which the gate lets the caller's group start."""
        if self._gate.capacity > 0 and not self._queue:
            return self._gate.admit()
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place in self._queue:
                self._queue.remove(place)
            if place.done() and not place.cancelled() and place.exception() is None:
                self._gate.fail()  # admitted in the moment of being cancelled
                self.serve()
            raise

    def serve(self) -> None:
        """Admits callers while the gate has room."""
        while self._queue and (self._queue[0].done() or self._gate.capacity > 0):
            place = self._queue.popleft()
            if not place.done():
                place.set_result(self._gate.admit())

    def fail(self, error: Exception) -> None:
        """Fails every waiting caller with an error."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_exception(error)
