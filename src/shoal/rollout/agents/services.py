"""Task services of other processes in a run: their rollouts on sessions, and what to do while they are away."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from shoal.errors import TaskError
from shoal.rollout.agents.host import AgentSession
from shoal.rollout.agents.runner import AgentFailed, AgentLost, Play
from shoal.rollout.orchestrator import Source
from shoal.rollout.single_turn import failed
from shoal.tasks.remote_protocol import SessionAt
from shoal.tasks.remote_server import ServiceLate, ServiceLost, TaskServerThread
from shoal.tasks.remote_tasks import RemoteService
from shoal.tasks.sdk import EnvironmentFailed
from shoal.types import Outcome, Rollout, RolloutStatus, Split, Task

MARGIN_S = 0.5
"""Seconds before a rollout's deadline at which its worker reports that it is late."""
BAD_IN_A_ROW = 8
"""Number of failed groups after which a service rests."""
REST_S, LONGEST_REST_S = 5.0, 300.0
REDRAW_S, LONGEST_REDRAW_S = 1.0, 60.0
"""Seconds before another question is drawn in place of a failed draw; twice as long each time."""
NO_QUESTION = "no question can be drawn"
NO_PROCESS = "no process serves the task"
AWAY_S = 30.0
"""Seconds without a worker after which a service's share goes to the others: a worker may be starting again."""
ANOTHER = 1 << 32
"""Number added to the index of a question that cannot be drawn: another question takes its place."""


def remote_play(service: RemoteService) -> Play:
    """Has a worker of the service play a rollout."""

    async def play(task: Task, seat: AgentSession) -> Outcome:
        at = SessionAt(seat.base_url, seat.anthropic_base_url, seat.api_key)
        try:
            return await service.play(task, at, seat.timeout_s - min(MARGIN_S, 0.1 * seat.timeout_s))
        except ServiceLost as error:
            raise AgentLost(f"service: {error}") from error
        except ServiceLate as error:
            raise AgentFailed(f"deadline: {error}") from error
        except EnvironmentFailed as error:
            raise AgentFailed(f"environment: {error}") from error

    return play


@dataclass(slots=True)
class Health:
    """The rests of a service after failed groups, longer each time. Pure."""

    bad: int = 0
    rests: int = 0

    def ended(self, *, usable: bool) -> float:
        """Notes a group and returns the seconds to rest now, mostly 0."""
        if usable:
            self.bad = self.rests = 0
            return 0.0
        self.bad += 1
        if self.bad < BAD_IN_A_ROW:
            return 0.0
        self.bad, self.rests = 0, self.rests + 1
        return min(REST_S * 2.0 ** (self.rests - 1), LONGEST_REST_S)


@dataclass(slots=True)
class RemoteSource:
    """Implements `orchestrator.Source`. A service that is away, hangs or fails again and again lends its share."""

    service: RemoteService
    answer: Callable[[Task], Awaitable[tuple[Rollout, ...]]]
    group_size: int
    on_presence: Callable[[str, bool], None] = lambda name, present: None
    """Called when the service's share goes to others (False) and comes back (True)."""
    health: Health = field(default_factory=Health)
    _away: set[str] = field(default_factory=set)
    """Reasons for which its share goes to others."""
    _leaving: asyncio.TimerHandle | None = None
    _limits: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of the running groups."""

    @property
    def name(self) -> str:
        """The service's name."""
        return self.service.name

    @property
    def max_running(self) -> int | None:
        """Number of groups at once, by the limits of its workers now."""
        return -(-self.service.max_running // self.group_size)

    async def draw(self, index: int) -> Task:
        """The training task at `index`, or another one where there is none. Waits while the service is away."""
        wait_s = REDRAW_S
        while True:
            try:
                task = await self.service.draw_async(Split.TRAIN, index)
            except ServiceLost:
                continue  # whoever drew it is gone, which says nothing of the others
            except ServiceLate:
                self._is_away("no question came", True)
            except TaskError:
                self._is_away(NO_QUESTION, wait_s > REDRAW_S)
                index += ANOTHER
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_REDRAW_S)
            else:
                self._is_away(NO_QUESTION, False)
                self._is_away("no question came", False)
                return task

    async def rollouts(self, task: Task) -> tuple[Rollout, ...]:
        """The rollouts that `answer` returns; a service that only fails rests afterwards."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                rollouts = await self.answer(task)
        except TimeoutError:
            return tuple(failed(task, i, f"service: {NO_PROCESS}") for i in range(self.group_size))
        finally:
            self._limits.discard(limit)
        bad = sum(rollout.status is RolloutStatus.FAILED for rollout in rollouts)
        rest_s = self.health.ended(usable=2 * bad < len(rollouts))
        if rest_s:
            self._is_away("it rests", True)
            asyncio.get_running_loop().call_later(rest_s, self._is_away, "it rests", False)
        return rollouts

    def served_by(self, workers: int) -> None:
        """How many there are now. With none, what runs waits for one; after `AWAY_S` it is given up, and with it the
        places that it takes from the others."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if workers:
            self._is_away(NO_PROCESS, False)
        else:
            self._leaving = asyncio.get_running_loop().call_later(AWAY_S, self._gone)

    def _gone(self) -> None:
        self._is_away(NO_PROCESS, True)
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now_s)

    def _is_away(self, why: str, away: bool) -> None:
        """Notifies when the first reason comes, and when the last reason goes."""
        before = bool(self._away)
        (self._away.add if away else self._away.discard)(why)
        if bool(self._away) != before:
            self.on_presence(self.name, before)


def attend(server: TaskServerThread, sources: Sequence[Source], wake: Callable[[], None]) -> None:
    """Notifies the sources, on the calling event loop, of the number of their workers; `wake` is called too."""
    loop = asyncio.get_running_loop()
    served = {source.name: source for source in sources if isinstance(source, RemoteSource)}

    def changed(name: str, workers: int) -> None:
        served[name].served_by(workers)
        wake()

    def notify(name: str, workers: int) -> None:
        loop.call_soon_threadsafe(changed, name, workers)

    server.server.registry.on_workers = notify
    for source in served.values():
        if not server.server.registry.workers_of(source.name):
            source.served_by(0)
