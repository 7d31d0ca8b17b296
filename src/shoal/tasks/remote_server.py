"""The run's server of roles with the workers of its remote tasks.

    GET /v1/status   tasks and their workers

The server has a thread, because a run draws its first questions before its event loop exists. `TaskServer` and its
services belong to the event loop of that thread.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ShoalError, WorkerLost
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer
from shoal.net.server import decoded, json
from shoal.tasks.remote_protocol import Job, JobDone, JobFailed, Result, RolloutJob, TaskRole
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed

AWAY_S = 30.0
"""Seconds without a worker after which a service's share goes to the others: a worker may be starting again."""
NO_PROCESS = "no process serves the task"
R = TypeVar("R")


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
