"""The run's side of an environment in other processes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shoal.errors import TaskError
from shoal.interfaces import Environment, Model, Scorer
from shoal.tasks.remote_protocol import DrawJob, RolloutJob, ScoreJob, TaskRole
from shoal.tasks.remote_server import ServiceLate, TaskServer
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed
from shoal.types import Outcome, Reward, RewardStatus, Split, Task

DRAW_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 60.0
MARGIN_S = 1.0
"""Seconds after a rollout's deadline at which its job ends, unless cancelled before."""
RETRIES = 3
RETRY_S = 0.5
R = TypeVar("R")


class RemoteEnvironment(Environment):
    """Has the workers of a service do everything, and checks their answers."""

    def __init__(self, name: str, server: TaskServer) -> None:
        self.name, self._server, self._service = name, server, server.services[name]

    def await_worker(self, timeout_s: float) -> None:
        """Waits for the first worker; blocks. Raises `TaskError` after `timeout_s`."""
        try:
            self._server.wait(asyncio.wait_for(self._service.served.wait(), timeout_s))
        except TimeoutError:
            raise TaskError(
                f"tasks.{self.name}: expected a process that serves it, none registered within {timeout_s:g} s; start "
                f"one with: shoal task serve MODULE:TASK --orchestrator {self._server.url}"
            ) from None

    @property
    def _workers(self) -> list[TaskRole]:
        return list(self._service.roles.values())

    @property
    def converses(self) -> bool:
        """True if its workers hold the conversations."""
        return any(worker.converses for worker in self._workers)

    @property
    def scores(self) -> bool:
        """True if its workers score."""
        return any(worker.scores for worker in self._workers)

    @property
    def timeout_s(self) -> float:
        """Seconds that one rollout may take, the most of its workers."""
        return max((worker.timeout_s for worker in self._workers), default=300.0)

    @property
    def max_running(self) -> int:
        """Number of rollouts at once, of all workers together."""
        return sum(worker.max_running for worker in self._workers)

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; blocks. Raises `TaskError`."""
        try:
            return self._server.wait(self._draw(split, index))
        except (PolicyFailed, EnvironmentFailed) as error:
            raise TaskError(f"{self.name}: no question at {split}/{index}: {error}") from error

    async def drawn(self, split: Split, index: int) -> Task:
        """The task at `index`, under the run's own name, as soon as a worker serves it. Raises `EnvironmentFailed`."""
        try:
            return await self._server.done(self._draw(split, index))
        except (PolicyFailed, EnvironmentFailed) as error:
            raise EnvironmentFailed(str(error), retry=True) from error

    async def _draw(self, split: Split, index: int) -> Task:
        await self._service.served.wait()
        task = await self._call(DrawJob(split, index), Task, DRAW_TIMEOUT_S)
        if not task.messages:
            raise EnvironmentFailed(f"expected a question at {split}/{index}, got one without messages")
        return replace(task, id=f"{self.name}/{split}/{index}", service=self.name)

    async def _call(self, job: DrawJob | ScoreJob, kind: type[R], timeout_s: float) -> R:
        """Has a job done, by another worker when the first is lost."""
        for _ in range(RETRIES):
            try:
                return await self._server.call(self.name, job, kind, timeout_s)
            except EnvironmentFailed as error:
                if not error.retry:
                    raise
            await asyncio.sleep(RETRY_S)
        return await self._server.call(self.name, job, kind, timeout_s)

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Has a worker play. Raises `PolicyFailed` and `EnvironmentFailed`; a lost rollout needs a new session."""
        job = RolloutJob(task, model.base_url, model.anthropic_base_url, model.api_key)
        return await self._server.done(self._server.call(self.name, job, Outcome, self.timeout_s + MARGIN_S))

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order; a failure is a status."""
        status = RewardStatus.FAILED
        try:
            scoring = self._call(ScoreJob(task, list(answers)), list[Reward], SCORE_TIMEOUT_S)
            rewards = await self._server.done(scoring)
            if len(rewards) == len(answers):
                return rewards
            why = f"{self.name}: expected {len(answers)} rewards, got {len(rewards)}"
        except ServiceLate as error:
            status, why = RewardStatus.TIMED_OUT, str(error)
        except (EnvironmentFailed, PolicyFailed) as error:
            why = str(error)
        return [Reward(0.0, status, evidence=why)] * len(answers)


@dataclass(frozen=True, slots=True)
class EnvironmentScorer:
    """Implements `interfaces.Scorer`: an environment that scores does so for its own tasks, `others` for the rest."""

    environments: Mapping[str, Environment]
    others: Scorer

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        own = self.environments.get(task.service)
        return await (own if own is not None and own.scores else self.others).score(task, answers)
