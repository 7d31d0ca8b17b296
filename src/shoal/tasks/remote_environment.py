"""The run's side of an environment in other processes: the server of its workers, and the environment that asks them.

    GET /v1/status   tasks and their workers

The server has a thread, because a run draws its first questions before its event loop exists. `TaskServer` and its
services belong to the event loop of that thread.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.checker import is_confined, task_spec
from shoal.errors import ShoalError, TaskError, WorkerLost
from shoal.interfaces import Environment, Model, Scorer
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer
from shoal.net.server import decoded, json
from shoal.tasks.remote_protocol import DrawJob, Job, JobDone, JobFailed, Result, RolloutJob, ScoreJob, TaskRole
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed
from shoal.types import Outcome, Reward, RewardStatus, Split, Task

R = TypeVar("R")
AWAY_S = 30.0
"""Seconds without a worker after which a service's share goes to the others: a worker may be starting again."""
NO_PROCESS = "no process serves the task"


class ServiceLate(EnvironmentFailed):
    """No result came within the deadline."""


@dataclass(slots=True)
class Service:
    """The workers of one task, and their places for rollouts."""

    roles: dict[str, TaskRole] = field(default_factory=dict)
    workers: dict[str, LeasedWorker] = field(default_factory=dict)
    free: "asyncio.PriorityQueue[tuple[int, str]]" = field(default_factory=asyncio.PriorityQueue)
    """Number and worker of each free place: of two workers the one with fewer rollouts comes first."""
    present: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a worker is there."""
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set from the first worker on, until there has been none for long."""
    jobs: int = 0
    """Jobs without a result."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of jobs by result."""

    def join(self, role: TaskRole, worker: LeasedWorker) -> None:
        """Adds a worker. Raises `NotWanted` for another version than that of the workers here."""
        for other in self.roles.values():
            if (other.version, other.converses, other.scores) != (role.version, role.converses, role.scores):
                raise NotWanted(
                    f"version: {role.name!r} is served in version {other.version!r}, perhaps with other methods; "
                    "end those processes first"
                )
        name = worker.name
        self.roles[name], self.workers[name] = role, worker
        for place in range(role.max_running):
            self.free.put_nowait((place, name))
        self.present.set()
        self.served.set()

    def leave(self, name: str) -> None:
        """Removes a worker and its free places."""
        del self.roles[name], self.workers[name]
        for place in [self.free.get_nowait() for _ in range(self.free.qsize())]:
            if place[1] != name:
                self.free.put_nowait(place)
        if not self.workers:
            self.present.clear()

    def give_up(self) -> None:
        """Fails the rollouts that wait for a worker."""
        self.served.clear()
        for _ in range(self.jobs):
            self.free.put_nowait((0, ""))

    @asynccontextmanager
    async def worker(self, *, plays: bool) -> AsyncIterator[LeasedWorker]:
        """A worker for one job, as soon as one is there; a draw or a score takes no rollout's place."""
        if not plays:
            while not self.workers:
                await self.present.wait()
            yield min(self.workers.values(), key=lambda worker: worker.running)
            return
        while (place := await self.free.get())[1] not in self.workers:
            if not self.served.is_set():
                raise EnvironmentFailed(NO_PROCESS)
        try:
            yield self.workers[place[1]]
        finally:
            if place[1] in self.workers:
                self.free.put_nowait(place)


class TaskServer(RunServer):
    """A server of roles that takes the workers of remote tasks."""

    def __init__(self, names: Collection[str], *, away_s: float = AWAY_S, **settings: Any) -> None:
        """`settings` are those of `RunServer`."""
        super().__init__([Route("/v1/status", self._status)], **settings)
        self.services = {name: Service() for name in names}
        self.on_workers: Callable[[str, bool], None] = lambda name, served: None
        """Called in the server's thread when a worker came or left; a service is served until `away_s` without one."""
        self._away_s = away_s
        self._leaving: dict[str, asyncio.TimerHandle] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self.open(TaskRole, self._working, self.loop)
        return self

    async def call(self, name: str, job: Job, kind: type[R], timeout_s: float) -> R:
        """Has a service do a job, on the server's loop.

        Raises `ServiceLate`, `PolicyFailed` and `EnvironmentFailed`, with `retry` when the worker was lost.
        """
        service, what = self.services[name], str(job.__struct_config__.tag)
        service.jobs += 1
        try:
            async with asyncio.timeout(timeout_s), service.worker(plays=isinstance(job, RolloutJob)) as worker:
                data = await worker.called(msgspec.json.encode(job), timeout_s)
            done: Result = decoded(data, Result)  # type: ignore[arg-type]
            if isinstance(done, JobDone):
                value = decoded(bytes(done.value), kind)
                service.counts[f"{what} done"] += 1
                return value
        except TimeoutError:
            service.counts[f"{what} late"] += 1
            raise ServiceLate(f"{name}: nothing came of a {what} within {timeout_s:g} s") from None
        except WorkerLost:
            done = JobFailed("the process that had the job is gone", retry=True)
        except (ShoalError, EnvironmentFailed) as error:
            done = JobFailed(str(error))
        finally:
            service.jobs -= 1
        why = "lost" if done.retry else f"failed: {'policy' if done.by_policy else 'environment'}"
        service.counts[f"{what} {why}"] += 1
        if done.by_policy:
            raise PolicyFailed(done.reason)
        raise EnvironmentFailed(done.reason, retry=done.retry)

    @asynccontextmanager
    async def _working(self, role: TaskRole, worker: LeasedWorker) -> AsyncIterator[None]:
        """Has a worker in its service until it leaves; waiting jobs are given up after `away_s` without any."""
        task = role.name
        if task not in self.services:
            raise NotWanted(f"name: expected one of {', '.join(sorted(self.services))}, got {task!r}")
        service = self.services[task]
        service.join(role, worker)
        if task in self._leaving:
            self._leaving.pop(task).cancel()
        self.on_workers(task, True)
        try:
            yield
        finally:
            service.leave(worker.name)
            if not service.workers:
                self._leaving[task] = asyncio.get_running_loop().call_later(self._away_s, self._gone, task)
            self.on_workers(task, True)

    def _gone(self, task: str) -> None:
        self.services[task].give_up()
        self.on_workers(task, False)

    async def _status(self, _: Request) -> Response:
        return json({name: self.status_of(name) for name in self.services})

    def status_of(self, name: str) -> dict[str, object]:
        """Status of one service: its workers, its waiting and running jobs, and the results so far."""
        service = self.services[name]
        running = sum(worker.running for worker in service.workers.values())
        return {
            "members": len(service.workers),
            "version": next((role.version for role in service.roles.values()), None),
            "max_running": sum(role.max_running for role in service.roles.values()),
            "waiting": service.jobs - running,
            "running": running,
            "jobs": dict(service.counts),
        }


DRAW_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 60.0
MARGIN_S = 1.0
"""Seconds after a rollout's deadline at which its job ends, unless cancelled before."""
RETRIES = 3
RETRY_S = 0.5


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
        with suppress(TaskError):  # a rollout of the task says what is wrong
            if not is_confined(task_spec(task)):
                raise EnvironmentFailed(
                    "scorer: expected no function and no judge, which are the run's own; add a `score`"
                )
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
