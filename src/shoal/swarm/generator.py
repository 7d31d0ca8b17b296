"""A generator is a peer that does not train: it draws questions, signs the answers of an `Answerer`, and shares them.

The `Answerer` is a model behind a URL or a rule (`answerers.py`). The takers score its answers. A generator
scores and takes nothing.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import EngineError, RequestRefused, ShoalError, TaskError, WireError
from shoal.interfaces import Environment
from shoal.swarm.answerers import Answerer
from shoal.swarm.peer import RETRY_S, Joined, Peer
from shoal.swarm.wire.offer import MAX_ROLLOUTS, Offer, model_name
from shoal.types import Split, seed_for

MOST_FAILURES = 5
"""Consecutive failures, before the first shared group, after which a generator with a group limit gives up."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratorPace:
    """Amount and rate of a generator's groups."""

    rollouts: int = 8
    """Answers to one question."""
    every_s: float = 1.0
    """Seconds between two questions, at least; takers read at most 8 messages a second of one author."""
    groups: int | None = None
    """Groups after which the generator ends; None for never."""


class Generator(Peer):
    """Peer that draws, asks and shares. One event loop; `run` ends after `pace.groups` or never."""

    def __init__(
        self, joined: Joined, services: Sequence[Environment], answerer: Answerer, pace: GeneratorPace
    ) -> None:
        super().__init__(joined)
        self._answerer, self._pace = answerer, pace
        self._services = {service.name: service for service in services}
        self._failure, self._failures = "", 0
        """Reason of the last failure, and number of consecutive failures."""

    async def run(self) -> None:
        """Shares the groups of its pace. Raises a `ShoalError`.

        A model that refuses the first question ends the run. So do failures from the start, if the pace limits groups.
        """
        async with asyncio.TaskGroup() as tasks:
            beside = tasks.create_task(self.beside(), name="generator: listening and reporting")
            try:
                await self._share_all()
            finally:
                beside.cancel()

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        common = super().status()
        return {
            **common,
            "failure": common["failure"] or self._failure,
            "generator": self._answerer.kind.value,
            "model": self._answerer.name,
        }

    async def _share_all(self) -> None:
        made = 0
        while self._pace.groups is None or made < self._pace.groups:
            began_s = time.monotonic()
            shared = self.connected and await self._share(made)
            made += shared
            rest_s = self._pace.every_s - (time.monotonic() - began_s)
            await asyncio.sleep(rest_s if shared else max(rest_s, RETRY_S))

    async def _share(self, number: int) -> bool:
        """Shares one group; returns whether it was done. A failure ends nothing once a group was shared."""
        index = seed_for("generator", self.peer_id, self._signer.session, number) % 2**31
        name = random.Random(index).choice(list(self._services))
        try:
            task = await asyncio.to_thread(self._services[name].draw, Split.TRAIN, index)
            answers = await self._answerer.answers(task, min(self._pace.rollouts, MAX_ROLLOUTS))
            if answers:
                claim, model = await self._own.claim(task), model_name(self._answerer.name)
                made = Offer(claim, tuple(answers[:MAX_ROLLOUTS]), self._answerer.kind, model, self._clock())
                await self._share_offer(made)
            else:
                self.tally.unsent += 1
        except (TaskError, WireError, ValueError, EngineError) as error:
            self.tally.unsent += 1
            self._failed(error)
            return False
        self._failure, self._failures = "", 0
        return True

    def _failed(self, error: Exception) -> None:
        """Reports a failure in log and status. Raises a `ShoalError` when further attempts are useless."""
        why = str(error) or type(error).__name__
        if why != self._failure:
            LOG.warning("no group was shared: %r", why)  # quoted: a server may have written it
        self._failure = why
        self._failures += 1
        if self.tally.shared:
            return
        if isinstance(error, RequestRefused):
            raise error
        if self._pace.groups is not None and self._failures >= MOST_FAILURES:
            raise ShoalError(f"no group could be shared, {self._failures} in a row failed; the last: {why}") from error
