"""Task services of other processes in a run: their rollouts on sessions, and what to do while they are away."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shoal.agents.host import Seat
from shoal.agents.runner import AgentFailed, AgentLost, Play
from shoal.errors import TaskError
from shoal.tasks.hub import ServiceLate, ServiceLost
from shoal.tasks.remote import RemoteService
from shoal.tasks.sdk import EnvironmentFailed
from shoal.tasks.service import SessionAt
from shoal.types import Outcome, Rollout, RolloutStatus, Split, Task

MARGIN_S = 0.5
"""Before a rollout's deadline: who plays it says that it is late before it is given up."""
BAD_IN_A_ROW = 8
"""Failed groups after which a service rests."""
REST_S, LONGEST_REST_S = 5.0, 300.0
REDRAW_S = 1.0
ANOTHER = 1 << 32
"""Added to the index of a question that cannot be drawn: another one takes its place."""


def remote_play(service: RemoteService) -> Play:
    """Has a rollout played by one of the service's processes."""

    async def play(task: Task, seat: Seat) -> Outcome:
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
    """When a service rests: after groups of which nothing came, for longer each time. Pure."""

    bad: int = 0
    rests: int = 0

    def ended(self, *, usable: bool) -> float:
        """Notes a group; seconds to rest now, mostly 0."""
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

    @property
    def name(self) -> str:
        """The service's."""
        return self.service.name

    @property
    def max_running(self) -> int | None:
        """Groups at once, by what its processes take now."""
        return -(-self.service.max_running // self.group_size)

    async def draw(self, index: int) -> Task:
        """The training task at `index`, or another one where there is none. Waits while the service is away."""
        away = False
        while True:
            try:
                task = await self.service.drawn(Split.TRAIN, index)
            except ServiceLost:
                continue  # whoever drew it is gone, which says nothing of the others
            except ServiceLate:
                away = True
                self.on_presence(self.name, False)
            except TaskError:
                index += ANOTHER
                await asyncio.sleep(REDRAW_S)
            else:
                if away:
                    self.on_presence(self.name, True)
                return task

    async def rollouts(self, task: Task) -> tuple[Rollout, ...]:
        """As `answer` gives them; a service that only ever fails has a rest afterwards."""
        rollouts = await self.answer(task)
        failed = sum(rollout.status is RolloutStatus.FAILED for rollout in rollouts)
        rest_s = self.health.ended(usable=2 * failed < len(rollouts))
        if rest_s:
            loop = asyncio.get_running_loop()
            self.on_presence(self.name, False)
            loop.call_later(rest_s, self.on_presence, self.name, True)
        return rollouts
