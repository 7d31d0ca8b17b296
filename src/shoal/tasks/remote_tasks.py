"""A task service of other processes, as the run that trains on it sees it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from shoal.errors import TaskError
from shoal.interfaces import Scorer
from shoal.tasks.remote_protocol import (
    Capability,
    DrawJob,
    Hello,
    Job,
    JobFailed,
    JobScores,
    JobTask,
    Played,
    Result,
    RolloutJob,
    ScoreJob,
    SessionAt,
    Whose,
)
from shoal.tasks.remote_server import ServiceLate, ServiceLost, TaskServerThread
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed
from shoal.types import Outcome, Reward, RewardStatus, Split, Task

DRAW_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 60.0
RETRIES = 3
RETRY_S = 0.5
POLL_S = 0.05

R = TypeVar("R", JobTask, Played, JobScores)


@dataclass(frozen=True, slots=True)
class RemoteService:
    """Implements `interfaces.TaskService` by asking the processes that serve it. Everything they say is checked."""

    name: str
    hub: TaskServerThread

    def present(self, timeout_s: float) -> Hello:
        """What the first process says of itself, once there is one. Raises `TaskError` after `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            if members := self.hub.hub.registry.members_of(self.name):
                return members[0]
            time.sleep(POLL_S)
        raise TaskError(
            f"tasks.{self.name}: expected a process that serves it, none registered within {timeout_s:g} s; start one "
            f"with: shoal task serve MODULE:TASK --orchestrator {self.hub.url}"
        )

    @property
    def timeout_s(self) -> float:
        """Deadline of one rollout, as its processes have it."""
        return max((one.timeout_s for one in self.hub.hub.registry.members_of(self.name)), default=300.0)

    @property
    def max_running(self) -> int:
        """Rollouts that its processes take at once."""
        return self.hub.hub.registry.max_running_of(self.name)

    def has(self, capability: Capability) -> bool:
        """Whether its processes do that themselves."""
        return any(capability in member.capabilities for member in self.hub.hub.registry.members_of(self.name))

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; blocks. Raises `TaskError`."""
        for attempt in range(RETRIES + 1):
            try:
                return self._task(self.hub.call(self.name, DrawJob(split, index), DRAW_TIMEOUT_S), split, index)
            except ServiceLost:
                if attempt == RETRIES:
                    raise
                time.sleep(RETRY_S)
        raise AssertionError

    async def drawn(self, split: Split, index: int) -> Task:
        """The same, without blocking. Raises `TaskError`."""
        return self._task(await self._called(DrawJob(split, index), DRAW_TIMEOUT_S), split, index)

    async def play(self, task: Task, session: SessionAt, timeout_s: float) -> Outcome:
        """What a rollout came to. Raises `ServiceLost`, `ServiceLate`, `PolicyFailed` and `EnvironmentFailed`.

        A lost one is not tried again here: it needs a new session.
        """
        result = await self.hub.called(self.name, RolloutJob(task, session), timeout_s)
        return _expected(result, Played).outcome

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order; what goes wrong is a status."""
        status = RewardStatus.FAILED
        try:
            result = await self._called(ScoreJob(task, list(answers)), SCORE_TIMEOUT_S)
            rewards = _expected(result, JobScores).rewards
            if len(rewards) == len(answers):
                return rewards
            why = f"{self.name}: expected {len(answers)} rewards, got {len(rewards)}"
        except ServiceLate as error:
            status, why = RewardStatus.TIMED_OUT, str(error)
        except (TaskError, EnvironmentFailed, PolicyFailed) as error:
            why = str(error)
        return [Reward(0.0, status, evidence=why)] * len(answers)

    async def _called(self, job: Job, timeout_s: float) -> Result:
        """The result, of another process when the first is lost."""
        for _ in range(RETRIES):
            try:
                return await self.hub.called(self.name, job, timeout_s)
            except ServiceLost:
                await asyncio.sleep(RETRY_S)
        return await self.hub.called(self.name, job, timeout_s)

    def _task(self, result: Result, split: Split, index: int) -> Task:
        """A task under a name of ours. Raises `TaskError`."""
        try:
            task = _expected(result, JobTask).task
        except (PolicyFailed, EnvironmentFailed) as error:
            raise TaskError(f"{self.name}: no question at {split}/{index}: {error}") from error
        if not task.messages:
            raise TaskError(f"{self.name}: expected a question at {split}/{index}, got one without messages")
        return replace(task, id=f"{self.name}/{split}/{index}", service=self.name)


class Scoring(Protocol):
    """A task service that may score answers itself."""

    def has(self, capability: Capability) -> bool:
        """Whether it does."""
        ...

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceScorer:
    """Implements `interfaces.Scorer`: what a service scores itself is asked there, the rest of `others`."""

    services: Mapping[str, Scoring]
    others: Scorer

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        service = self.services.get(task.service)
        if service is not None and service.has(Capability.SCORE):
            return await service.score(task, answers)
        return await self.others.score(task, answers)


def _expected(result: Result, kind: type[R]) -> R:
    """The result, when it is of the kind that was asked for."""
    if isinstance(result, kind):
        return result
    if isinstance(result, JobFailed):
        raise PolicyFailed(result.reason) if result.whose is Whose.POLICY else EnvironmentFailed(result.reason)
    raise EnvironmentFailed(f"expected {kind.__name__.lower()}, got {type(result).__name__.lower()}")
