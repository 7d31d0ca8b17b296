"""The run's side of a task service in other processes."""

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
    JobOutcome,
    JobScores,
    JobTask,
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

R = TypeVar("R", JobTask, JobOutcome, JobScores)


@dataclass(frozen=True, slots=True)
class RemoteService:
    """Implements `interfaces.TaskService` with a service's workers. Every answer of a worker is checked."""

    name: str
    server: TaskServerThread

    def present(self, timeout_s: float) -> Hello:
        """Waits for the first worker and returns its registration. Raises `TaskError` after `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            if workers := self.server.server.registry.workers_of(self.name):
                return workers[0]
            time.sleep(POLL_S)
        raise TaskError(
            f"tasks.{self.name}: expected a process that serves it, none registered within {timeout_s:g} s; start one "
            f"with: shoal task serve MODULE:TASK --orchestrator {self.server.url}"
        )

    @property
    def timeout_s(self) -> float:
        """Seconds that one rollout may take, the most of its workers."""
        return max((one.timeout_s for one in self.server.server.registry.workers_of(self.name)), default=300.0)

    @property
    def max_running(self) -> int:
        """Number of rollouts at once, of all workers together."""
        return self.server.server.registry.max_running_of(self.name)

    def has(self, capability: Capability) -> bool:
        """True if some worker of the service has the capability."""
        return any(capability in worker.capabilities for worker in self.server.server.registry.workers_of(self.name))

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; blocks. Raises `TaskError`."""
        for attempt in range(RETRIES + 1):
            try:
                return self._task(self.server.call(self.name, DrawJob(split, index), DRAW_TIMEOUT_S), split, index)
            except ServiceLost:
                if attempt == RETRIES:
                    raise
                time.sleep(RETRY_S)
        raise AssertionError

    async def draw_async(self, split: Split, index: int) -> Task:
        """The task at `index`, without blocking. Raises `TaskError`."""
        return self._task(await self._call(DrawJob(split, index), DRAW_TIMEOUT_S), split, index)

    async def play(self, task: Task, session: SessionAt, timeout_s: float) -> Outcome:
        """Runs a rollout and returns its outcome.

        Raises `ServiceLost`, `ServiceLate`, `PolicyFailed` and `EnvironmentFailed`. A lost rollout is not repeated
        here: it needs a new session.
        """
        result = await self.server.call_async(self.name, RolloutJob(task, session), timeout_s)
        return _expected(result, JobOutcome).outcome

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order; a failure is a status."""
        status = RewardStatus.FAILED
        try:
            result = await self._call(ScoreJob(task, list(answers)), SCORE_TIMEOUT_S)
            rewards = _expected(result, JobScores).rewards
            if len(rewards) == len(answers):
                return rewards
            why = f"{self.name}: expected {len(answers)} rewards, got {len(rewards)}"
        except ServiceLate as error:
            status, why = RewardStatus.TIMED_OUT, str(error)
        except (TaskError, EnvironmentFailed, PolicyFailed) as error:
            why = str(error)
        return [Reward(0.0, status, evidence=why)] * len(answers)

    async def _call(self, job: Job, timeout_s: float) -> Result:
        """Has a job done, by another worker when the first is lost."""
        for _ in range(RETRIES):
            try:
                return await self.server.call_async(self.name, job, timeout_s)
            except ServiceLost:
                await asyncio.sleep(RETRY_S)
        return await self.server.call_async(self.name, job, timeout_s)

    def _task(self, result: Result, split: Split, index: int) -> Task:
        """The task of a result, under the run's own name. Raises `TaskError`."""
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
        """True if the service has the capability."""
        ...

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceScorer:
    """Implements `interfaces.Scorer`: a service with that capability scores its own tasks, `others` scores the rest."""

    services: Mapping[str, Scoring]
    others: Scorer

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        service = self.services.get(task.service)
        if service is not None and service.has(Capability.SCORE):
            return await service.score(task, answers)
        return await self.others.score(task, answers)


def _expected(result: Result, kind: type[R]) -> R:
    """The result, checked to be of the expected kind. Raises `PolicyFailed` and `EnvironmentFailed`."""
    if isinstance(result, kind):
        return result
    if isinstance(result, JobFailed):
        raise PolicyFailed(result.reason) if result.whose is Whose.POLICY else EnvironmentFailed(result.reason)
    raise EnvironmentFailed(f"expected {kind.__name__.lower()}, got {type(result).__name__.lower()}")
