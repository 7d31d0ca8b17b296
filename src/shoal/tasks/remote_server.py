"""The task server: a run's registry of environments in other processes, in a separate thread.

    GET /openapi.json    the protocol, for other languages
    GET /v1/status       services and their workers
    GET /v1/work         the WebSocket of a worker

Every route but the first wants `Authorization: Bearer TOKEN`. The server has a thread, because a run draws its first
questions before its event loop exists.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from shoal.errors import TaskError
from shoal.net.client import LEASE_S
from shoal.net.run_server import RunServer, send
from shoal.net.server import decoded, json
from shoal.tasks.remote_protocol import (
    PATH,
    PROTOCOL,
    Cancel,
    Hello,
    Job,
    JobFailed,
    Result,
    Service,
    Unwanted,
    Welcome,
    document,
)
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed

MOST_QUICK = 1 << 16
"""Number of draws and scores at once of one worker."""
AWAY_S = 30.0
"""Seconds without a worker after which a service's share goes to the others: a worker may be starting again."""
NO_PROCESS = "no process serves the task"
R = TypeVar("R")


class ServiceLate(EnvironmentFailed):
    """No result came within the deadline."""


class TaskServer(RunServer):
    """The services and their connections, all on one event loop. As a context manager it listens, in a thread."""

    def __init__(
        self,
        names: Collection[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        lease_s: float = LEASE_S,
        away_s: float = AWAY_S,
    ) -> None:
        """With a `token`, every request must carry it. Raises `ConfigError` when others reach `host` without one."""
        routes = [
            Route("/openapi.json", self._document),
            Route("/v1/status", self._status),
            WebSocketRoute(PATH, lambda socket: self.lease(socket, Hello, self._worker, _unwanted)),
        ]
        super().__init__(routes, host=host, port=port, token=token, free=("/openapi.json",), lease_s=lease_s)
        self.services = {name: Service() for name in names}
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        """Number of jobs by result, of each service."""
        self.on_workers: Callable[[str, bool], None] = lambda name, served: None
        """Called in the server's thread when a worker came or left; a service is served until `away_s` without one."""
        self.served = {name: asyncio.Event() for name in names}
        self._away_s = away_s
        self._leaving: dict[str, asyncio.TimerHandle] = {}

    async def call(self, name: str, job: Job, kind: type[R], timeout_s: float) -> R:
        """Has a service do a job, on the server's loop.

        Raises `ServiceLate`, `PolicyFailed` and `EnvironmentFailed`, with `retry` when the worker was lost.
        """
        what, counts = str(job.__struct_config__.tag), self.counts[name]
        try:
            done = await self.services[name].result(job, timeout_s)
        except TimeoutError:
            counts[f"{what} late"] += 1
            raise ServiceLate(f"{name}: nothing came of a {what} within {timeout_s:g} s") from None
        if isinstance(done, kind):
            counts[f"{what} done"] += 1
            return done
        if not isinstance(done, JobFailed):
            done = JobFailed(done.lease, f"expected {kind.__name__}, got {type(done).__name__}")
        counts[f"{what} lost" if done.retry else f"{what} failed: {'policy' if done.by_policy else 'environment'}"] += 1
        if done.by_policy:
            raise PolicyFailed(done.reason)
        raise EnvironmentFailed(done.reason, retry=done.retry)

    @asynccontextmanager
    async def _worker(self, hello: Hello, socket: WebSocket) -> AsyncIterator[Callable[[bytes], None]]:
        """One worker for as long as it is connected. Raises `TaskError` for one that is not wanted as it is."""
        if hello.protocol != PROTOCOL:
            raise TaskError(f"protocol: expected {PROTOCOL}, got {hello.protocol}; install the run's version")
        if hello.name not in self.services:
            raise TaskError(f"name: expected one of {', '.join(sorted(self.services))}, got {hello.name!r}")
        service = self.services[hello.name]
        worker = service.join(hello)
        self._noticed(hello.name)
        loops = (
            _send_all(socket, worker.outgoing),
            worker.feed(service.quick, MOST_QUICK),
            worker.feed(service.rollouts, hello.max_running),
        )
        tasks = [asyncio.create_task(each, name=f"jobs of {hello.name}") for each in loops]
        try:
            yield lambda message: worker.take(decoded(message, Result))  # type: ignore[arg-type]
        finally:
            for task in tasks:
                task.cancel()
            service.workers.remove(worker)
            worker.leave()
            self._noticed(hello.name)

    def _noticed(self, name: str) -> None:
        """A worker of a service came or left."""
        if name in self._leaving:
            self._leaving.pop(name).cancel()
        if self.services[name].workers:
            self.served[name].set()
        else:
            self._leaving[name] = asyncio.get_running_loop().call_later(self._away_s, self._gone, name)
        self.on_workers(name, self.served[name].is_set())

    def _gone(self, name: str) -> None:
        """Gives up the jobs that wait for a worker, and their places, after `away_s` without one."""
        self.served[name].clear()
        self.services[name].give_up(NO_PROCESS)
        self.on_workers(name, False)

    async def _status(self, _: Request) -> Response:
        return json({name: self.status_of(name) for name in self.services})

    def status_of(self, name: str) -> dict[str, object]:
        """Status of one service: its workers, its waiting and running jobs, and the results so far."""
        service = self.services[name]
        running = sum(len(worker.leases) for worker in service.workers)
        return {
            "members": len(service.workers),
            "version": service.workers[0].hello.version if service.workers else None,
            "max_running": sum(worker.hello.max_running for worker in service.workers),
            "waiting": len(service.leases) - running,
            "running": running,
            "jobs": dict(self.counts[name]),
        }

    async def _document(self, _: Request) -> Response:
        return json(document())


def _unwanted(error: Exception) -> Unwanted:
    return Unwanted(str(error))


async def _send_all(socket: WebSocket, outgoing: "asyncio.Queue[Job | Cancel]") -> None:
    await send(socket, Welcome())
    while True:
        await send(socket, await outgoing.get())
