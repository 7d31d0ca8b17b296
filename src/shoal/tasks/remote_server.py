"""The task server: a run's registry of task services over HTTP, in a thread of its own.

    GET    /openapi.json                 the protocol, for other languages
    GET    /v1/status                    services and their workers
    POST   /v1/members                   Hello -> Welcome
    POST   /v1/members/MEMBER/work       WorkRequest -> Work, after `beat_s` at the latest; the heartbeat
    POST   /v1/members/MEMBER/results    Results -> Acknowledged
    DELETE /v1/members/MEMBER            leaves

Every route but the first wants `Authorization: Bearer TOKEN`. The server has a thread, because a run draws its first
questions before its event loop exists. A busy event loop must also not delay heartbeats.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Collection
from types import TracebackType
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ConfigError, TaskError
from shoal.net.listening import is_loopback, listening_socket, url_of
from shoal.net.server import HANDLERS, body, decoded, guarded, json, uvicorn_config
from shoal.tasks.openapi import document
from shoal.tasks.remote_protocol import (
    BEAT_S,
    LEASE_S,
    Acknowledged,
    Hello,
    Job,
    JobFailed,
    Lost,
    Registry,
    Result,
    Results,
    Welcome,
    Work,
    WorkRequest,
)

MOST_BODY_BYTES = 64 << 20
STOP_GRACE_S = 1
T = TypeVar("T")


class ServiceLost(TaskError):
    """The worker of a job is gone, or reported that another attempt may help."""


class ServiceLate(TaskError):
    """No result came within the deadline."""


class TaskServer:
    """The registry and its waiting requests, all on one event loop."""

    def __init__(
        self,
        names: Collection[str],
        *,
        token: str = "",
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
        host: str = "",
    ) -> None:
        """With a `token`, every request must carry it. `host` is the address that the user configured."""
        self.registry = Registry(names, lease_s=lease_s)
        self.registry.on_work = self._wake
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        """Number of jobs by result, of each service."""
        self._beat_s, self._lease_s = beat_s, lease_s
        self._events: dict[str, asyncio.Event] = {}
        self._closing = False
        routes = [
            Route("/openapi.json", self._document),
            Route("/v1/status", self._status),
            Route("/v1/members", self._join, methods=["POST"]),
            Route("/v1/members/{member}/work", self._work, methods=["POST"]),
            Route("/v1/members/{member}/results", self._results, methods=["POST"]),
            Route("/v1/members/{member}", self._leave, methods=["DELETE"]),
        ]
        guard = Middleware(guarded, token=token, free=("/openapi.json",), host=host)
        self.app = Starlette(
            routes=routes, middleware=[guard], lifespan=self._lifespan, exception_handlers=dict(HANDLERS)
        )

    async def call(self, name: str, job: Job, timeout_s: float) -> Result:
        """Has a service do a job and returns the result. Raises `ServiceLost` and `ServiceLate`."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Result | Lost] = loop.create_future()

        def done(result: Result | Lost) -> None:
            if not waiting.done():
                waiting.set_result(result)

        kind = type(job).__name__.removesuffix("Job").lower()
        ticket = self.registry.submit(name, job, due_s=loop.time() + timeout_s, done=done)
        try:
            async with asyncio.timeout(timeout_s):
                result = await waiting
        except TimeoutError:
            self.counts[name][f"{kind} late"] += 1
            raise ServiceLate(f"{name}: nothing came of a {kind} within {timeout_s:g} s") from None
        finally:
            self.registry.withdraw(ticket)
        if isinstance(result, Lost):
            self.counts[name][f"{kind} lost"] += 1
            raise ServiceLost(f"{name}: {result.reason}")
        if isinstance(result, JobFailed):
            self.counts[name][f"{kind} failed: {result.whose}"] += 1
            if result.retry:
                raise ServiceLost(f"{name}: {result.reason}")
        else:
            self.counts[name][f"{kind} done"] += 1
        return result

    def close(self) -> None:
        """Answers all waiting requests, and gives out no more work."""
        self._closing = True
        for event in self._events.values():
            event.set()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._expire(), name="leases of task services")
        yield
        watching.cancel()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 6)
            self.registry.expire(asyncio.get_running_loop().time())

    def _wake(self, worker: str) -> None:
        event = self._events.get(worker)
        if event is not None:
            event.set()

    async def _join(self, http: Request) -> Response:
        hello = await _body(http, Hello)
        worker = self.registry.join(hello, asyncio.get_running_loop().time())
        return json(Welcome(worker, self._beat_s, self._lease_s))

    async def _work(self, http: Request) -> Response:
        worker, ask = http.path_params["member"], await _body(http, WorkRequest)
        loop = asyncio.get_running_loop()
        event = self._events[worker] = asyncio.Event()
        hangup = loop.create_task(_hangs_up(http), name="a task service waits for work")
        hangup.add_done_callback(lambda _: event.set())
        try:
            self.registry.renew(worker, ask, loop.time())
            work = Work([], [])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    while not self._closing:
                        work = self.registry.work(worker, ask.holding, loop.time())
                        if work.jobs or work.cancelled:
                            break
                        event.clear()
                        await event.wait()
                        if hangup.done():
                            self.registry.on_disconnect(worker, loop.time())
                            break
        finally:
            hangup.cancel()
            if self._events.get(worker) is event:
                del self._events[worker]
        return json(work)

    async def _results(self, http: Request) -> Response:
        given = await _body(http, Results)
        return json(Acknowledged(self.registry.results(http.path_params["member"], given.results)))

    async def _leave(self, http: Request) -> Response:
        self.registry.leave(http.path_params["member"])
        return Response(status_code=204)

    async def _status(self, _: Request) -> Response:
        return json({name: self.status_of(name) for name in self.registry})

    def status_of(self, name: str) -> dict[str, object]:
        """Status of one service: its workers, its waiting and running jobs, and the results so far."""
        workers = self.registry.workers_of(name)
        waiting, running = self.registry.load_of(name)
        return {
            "members": len(workers),
            "version": workers[0].version if workers else None,
            "max_running": self.registry.max_running_of(name),
            "waiting": waiting,
            "running": running,
            "jobs": dict(self.counts[name]),
        }

    async def _document(self, _: Request) -> Response:
        return json(document())


class TaskServerThread:
    """A task server in a thread. A context manager; `on_workers` is called in that thread."""

    def __init__(
        self,
        names: Collection[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        """Listens at once.

        Raises `ConfigError` when the port is taken, or when other hosts reach the port without a token.
        """
        if not is_loopback(host) and not token:
            raise ConfigError(f"host: {host} can be reached by others; set a token that task services must have")
        self.server = TaskServer(names, token=token, beat_s=beat_s, lease_s=lease_s, host=host)
        self._listening = listening_socket(host, port)
        self.url = url_of(self._listening)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="task services", daemon=True)
        self._server = uvicorn.Server(uvicorn_config(self.server.app, grace_s=STOP_GRACE_S))
        self._thread.start()

    def __enter__(self) -> "TaskServerThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; workers go on trying to connect."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.close)
            self._server.should_exit = True
        self._thread.join()

    def call(self, name: str, job: Job, timeout_s: float) -> Result:
        """Calls `TaskServer.call` from any thread but the server's, and blocks."""
        return asyncio.run_coroutine_threadsafe(self.server.call(name, job, timeout_s), self._loop).result()

    async def call_async(self, name: str, job: Job, timeout_s: float) -> Result:
        """Calls `TaskServer.call` from another event loop."""
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self.server.call(name, job, timeout_s), self._loop)
        )

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve(sockets=[self._listening]))


async def _hangs_up(http: Request) -> None:
    """Returns when the client has disconnected; the request's body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _body(http: Request, kind: type[T]) -> T:
    return decoded(await body(http, MOST_BODY_BYTES), kind)
