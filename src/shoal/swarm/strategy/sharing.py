"""A bounded queue of own groups to share; when full (the swarm is away), it drops the oldest."""

import asyncio

from shoal.errors import TaskError, WireError
from shoal.swarm.strategy.choice import Own, Sharer
from shoal.swarm.trust.ingress import Recogniser
from shoal.swarm.wire.offer import Offer, offer_of, offered
from shoal.types import Group
from shoal.wire import encode

OUTBOX = 64


class Outbox:
    """Own groups chosen for sharing, as offers. One event loop."""

    def __init__(self, own: Recogniser, sharer: Sharer, model: str) -> None:
        self._own, self._sharer, self._model = own, sharer, model
        self._queue: asyncio.Queue[tuple[Group, float]] = asyncio.Queue(OUTBOX)

    def put(self, group: Group, made_s: float) -> int:
        """Queues a group if the strategy shares it; returns the number of groups that made room."""
        rewards = tuple(rollout.reward.value for rollout in group.finished)
        question = group.task.messages
        answers = [offered(rollout, len(question)) for rollout in group.finished]
        size = len(encode((question[-1:], answers)))
        if not self._sharer(Own(group.task.service, rewards, size), asyncio.get_running_loop().time()):
            return 0
        dropped = int(self._queue.full())
        if dropped:
            self._queue.get_nowait()
        self._queue.put_nowait((group, made_s))
        return dropped

    async def next(self) -> Offer | None:
        """Waits for a group and returns its offer; None for a group that cannot travel."""
        group, made_s = await self._queue.get()
        try:
            claim = await self._own.claim(group.task)
            return offer_of(group, claim, self._model, made_s)
        except (TaskError, WireError, ValueError):
            return None
