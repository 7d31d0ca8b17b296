"""A generator is a peer that does not train: it draws questions, signs the answers of an `Answerer`, and shares them.

The `Answerer` is a model behind a URL (`chat.py`) or a rule (`rules.py`). The takers score its answers. A generator
scores and takes nothing, but it reads peers' wants and draws more of those tasks.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from shoal.errors import EngineError, ExchangeUnavailable, RequestRefused, ShoalError, TaskError, WireError
from shoal.interfaces import Exchange, Recogniser, TaskService
from shoal.swarm import offer as offers
from shoal.swarm.envelope import Kind
from shoal.swarm.identity import Identity
from shoal.swarm.node_files import NodeCounts
from shoal.swarm.offer import GeneratorKind, Offer, OfferedRollout, Want
from shoal.swarm.peer import Peer
from shoal.swarm.pending import Needs
from shoal.swarm.trust import VerifiedMessage
from shoal.types import Split, Task, seed_for

RETRY_S = 0.5
"""Seconds between two attempts after a failure, at least."""
MOST_FAILURES = 5
"""Consecutive failures, before the first shared group, after which a generator with a group limit gives up."""
FRESH_S = 600.0
"""Seconds after which a want is forgotten."""
UNASKED = 0.1
"""Weight of a task that nobody wants, beside 1 for a whole need."""
LOG = logging.getLogger(__name__)


class Answerer(Protocol):
    """Source of answers."""

    @property
    def kind(self) -> GeneratorKind:
        """Kind of generator that offers name."""
        ...

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    async def answers(self, task: Task, n: int) -> Sequence[OfferedRollout]:
        """Returns up to `n` answers, possibly none. Raises an `EngineError` while the source is away."""
        ...


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
        self,
        exchange: Exchange,
        own: Recogniser,
        services: Sequence[TaskService],
        answerer: Answerer,
        identity: Identity,
        folder: Path,
        *,
        swarm: str,
        pace: GeneratorPace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` holds banned.txt, which others may add to, and status.json."""
        super().__init__(exchange, swarm, identity, folder, clock=clock)
        self._own, self._answerer = own, answerer
        self._services = {service.name: service for service in services}
        self._pace = pace or GeneratorPace()
        self._rng = random.Random(seed_for("generator", identity.peer_id))
        self._needs = Needs()
        self._failure, self._failures = "", 0
        """Reason of the last failure, and number of consecutive failures; an unreachable swarm counts as none."""
        self.tally = NodeCounts()

    async def run(self) -> None:
        """Shares the groups of its pace and reads peers' wants meanwhile. Raises a `ShoalError`.

        A model that refuses the first question ends the run. So do failures from the start, if the pace limits groups.
        """
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen(), name="generator: listening")
            reporting = tasks.create_task(self._report(), name="generator: reporting")
            try:
                await self._share_all()
            finally:
                listening.cancel()
                reporting.cancel()

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        common = super().status()
        return {
            **common,
            "failure": common["failure"] or self._failure,
            "generator": self._answerer.kind.value,
            "model": self._answerer.name,
            "needs": self._wanted(),
            **asdict(self.tally),
        }

    async def _share_all(self) -> None:
        made = 0
        while self._pace.groups is None or made < self._pace.groups:
            began_s = time.monotonic()
            shared = self._exchange.connected and await self._share(made)
            made += shared
            rest_s = self._pace.every_s - (time.monotonic() - began_s)
            await asyncio.sleep(rest_s if shared else max(rest_s, RETRY_S))

    async def _share(self, number: int) -> bool:
        """Shares one group; returns whether it was done. A failure ends nothing once a group was shared."""
        service = self._services[self._next_service()]
        index = seed_for("generator", self.peer_id, self._session, number) % 2**31
        try:
            task = await asyncio.to_thread(service.draw, Split.TRAIN, index)
            answers = await self._answerer.answers(task, min(self._pace.rollouts, offers.MAX_ROLLOUTS))
            frame = await self._frame(task, answers[: offers.MAX_ROLLOUTS]) if answers else b""
            if frame:
                await self._exchange.publish(Kind.OFFER, self.peer_id, frame)
        except (TaskError, WireError, ValueError, EngineError, ExchangeUnavailable) as error:
            self.tally.unsent += 1
            self._failed(error)
            return False
        self._failure, self._failures = "", 0
        self.tally.shared += bool(frame)
        self.tally.unsent += not frame
        self.tally.shared_bytes += len(frame)
        return True

    async def _frame(self, task: Task, answers: Sequence[OfferedRollout]) -> bytes:
        """Signs the offer of a task's answers. Raises `TaskError`, `WireError` or `ValueError`."""
        claim = await self._own.claim(task)
        name = offers.model_name(self._answerer.name)
        made = Offer(claim, tuple(answers), self._answerer.kind, name, self._clock())
        return self._signer.frame(Kind.OFFER, offers.encode(made), self._clock())

    def _failed(self, error: Exception) -> None:
        """Reports a failure in log and status. Raises a `ShoalError` when further attempts are useless."""
        why = str(error) or type(error).__name__
        if why != self._failure:
            LOG.warning("no group was shared: %r", why)  # quoted: a server may have written it
        self._failure = why
        self._failures += not isinstance(error, ExchangeUnavailable)
        if self.tally.shared:
            return
        if isinstance(error, RequestRefused):
            raise error
        if self._pace.groups is not None and self._failures >= MOST_FAILURES:
            raise ShoalError(f"no group could be shared, {self._failures} in a row failed; the last: {why}") from error

    def _next_service(self) -> str:
        """Samples a task service, weighted by peers' needs."""
        wanted = self._wanted()
        names = list(self._services)
        return self._rng.choices(names, [UNASKED + wanted.get(name, 0.0) for name in names])[0]

    def _wanted(self) -> dict[str, float]:
        return self._needs.largest(self._clock() - FRESH_S)

    def _receive(self, message: VerifiedMessage) -> None:
        if isinstance(message.content, Want):
            self._needs.update(message, message.content)

    async def _periodic(self) -> None:
        self._needs.drop(self.ingress.banned)
