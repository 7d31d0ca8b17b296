"""The protocol of environments in other processes: messages over one WebSocket per worker, and who does what.

A worker connects to the run; the run never calls a worker, which may therefore sit behind any firewall. The connection
is the lease of all jobs that the worker has: when it breaks, others get them. `remote_server` is the other end.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Annotated, TypeAlias

import msgspec

from shoal.errors import TaskError
from shoal.types import Outcome, Reward, Split, Task

PROTOCOL = 2
PATH = "/v1/work"

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a worker. Several workers may serve one name, in one version."""

    name: Name
    version: Word
    converses: bool = False
    """True if the worker speaks with the model through a session; otherwise the run asks the model one question."""
    scores: bool = False
    """True if the worker scores answers; otherwise an outcome has its reward, or the task names a checker."""
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    """Number of rollouts at once."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Seconds that one rollout may take."""
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to a `Hello`: jobs follow."""


class Unwanted(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to a `Hello` or a result that the run does not want; the connection ends."""

    reason: str


class SessionAt(msgspec.Struct, frozen=True):
    """The address and key of a rollout's session. The session records all sampled tokens; the run ends it."""

    base_url: str
    anthropic_base_url: str
    api_key: str


class DrawJob(msgspec.Struct, frozen=True, tag="draw"):
    """Asks for the task at an index. Equal arguments give equal tasks, and the splits share no question."""

    split: Split
    index: int
    lease: str = ""
    deadline_s: float = 0.0
    """Seconds from now until the result is no longer awaited."""


class RolloutJob(msgspec.Struct, frozen=True, tag="rollout"):
    """Asks for a rollout on a task, through a session. A procedural task has its receipt."""

    task: Task
    session: SessionAt
    lease: str = ""
    deadline_s: float = 0.0


class ScoreJob(msgspec.Struct, frozen=True, tag="score"):
    """Asks for one reward per answer, in order."""

    task: Task
    answers: list[str]
    lease: str = ""
    deadline_s: float = 0.0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancels a job."""

    lease: str


Job: TypeAlias = DrawJob | RolloutJob | ScoreJob
ToWorker: TypeAlias = Welcome | Unwanted | Job | Cancel


class JobTask(msgspec.Struct, frozen=True, tag="drawn"):
    """The task of a `DrawJob`."""

    lease: str
    task: Task


class JobOutcome(msgspec.Struct, frozen=True, tag="played"):
    """The outcome of a `RolloutJob`."""

    lease: str
    outcome: Outcome


class JobScores(msgspec.Struct, frozen=True, tag="scored"):
    """The rewards of a `ScoreJob`."""

    lease: str
    rewards: list[Reward]


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A job failed, for a reason. Training uses a failure of the policy, and drops a failure of the environment."""

    lease: str
    reason: Word
    retry: bool = False
    """True if another attempt may help."""
    by_policy: bool = False


Result: TypeAlias = JobTask | JobOutcome | JobScores | JobFailed
_NUMBERS = count()


def document() -> dict[str, object]:
    """The protocol as an OpenAPI 3.1 document, made from the messages themselves."""
    kinds = (Hello, Result, ToWorker)
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    hello, result, answer = references
    upgrade = {
        "summary": "The WebSocket of a worker: it sends x-hello, then x-results; it gets x-messages",
        "responses": {"101": {"description": "a WebSocket"}, "401": {"description": "without the token"}},
        "x-hello": hello,
        "x-results": result,
        "x-messages": answer,
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal environments", "version": str(PROTOCOL)},
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": {PATH: {"get": upgrade}},
    }


@dataclass(slots=True, eq=False)
class Lease:
    """A submitted job. Invariant: one worker at a time has it; a caller that stops waiting cancels the result."""

    id: str
    job: Job
    due_s: float
    result: "asyncio.Future[Result]"


@dataclass(slots=True, eq=False)
class Worker:
    """A connected worker, the jobs that it has, and the messages on their way to it."""

    hello: Hello
    leases: dict[str, Lease] = field(default_factory=dict)
    outgoing: "asyncio.Queue[Job | Cancel]" = field(default_factory=asyncio.Queue)

    async def feed(self, waiting: "asyncio.Queue[Lease]", most: int) -> None:
        """Gives waiting jobs to the worker until cancelled, at most `most` at once."""
        room, clock = asyncio.Semaphore(most), asyncio.get_running_loop().time
        while True:
            await room.acquire()
            lease = await waiting.get()
            if lease.result.done():
                room.release()
                continue
            self.leases[lease.id] = lease
            lease.result.add_done_callback(partial(self._ended, lease.id, room))
            left_s = max(lease.due_s - clock(), 0.0)
            self.outgoing.put_nowait(msgspec.structs.replace(lease.job, lease=lease.id, deadline_s=left_s))

    def _ended(self, lease_id: str, room: asyncio.Semaphore, result: "asyncio.Future[Result]") -> None:
        del self.leases[lease_id]
        room.release()
        if result.cancelled():
            self.outgoing.put_nowait(Cancel(lease_id))

    def take(self, result: Result) -> None:
        """Takes a result; a late or repeated one is dropped."""
        lease = self.leases.get(result.lease)
        if lease is not None and not lease.result.done():
            lease.result.set_result(result)

    def leave(self) -> None:
        """Gives up the worker's jobs: another attempt may help."""
        for lease in list(self.leases):
            self.take(JobFailed(lease, "the process that had the job is gone", retry=True))


@dataclass(slots=True)
class Service:
    """The workers of one name, its jobs that no worker has yet, and all of its jobs."""

    workers: list[Worker] = field(default_factory=list)
    rollouts: "asyncio.Queue[Lease]" = field(default_factory=asyncio.Queue)
    quick: "asyncio.Queue[Lease]" = field(default_factory=asyncio.Queue)
    """Draws and scores, which take no rollout's place at a worker."""
    leases: dict[str, Lease] = field(default_factory=dict)

    def join(self, hello: Hello) -> Worker:
        """Registers a worker. Raises `TaskError` for one that is not wanted as it is."""
        for other in (one.hello for one in self.workers):
            if (other.version, other.converses, other.scores) != (hello.version, hello.converses, hello.scores):
                raise TaskError(
                    f"version: {hello.name!r} is served in version {other.version!r}, perhaps with other methods; "
                    "end those processes first"
                )
        self.workers.append(Worker(hello))
        return self.workers[-1]

    async def result(self, job: Job, timeout_s: float) -> Result:
        """Has a worker, present or future, do a job. Raises `TimeoutError`."""
        loop = asyncio.get_running_loop()
        lease = Lease(f"{next(_NUMBERS):x}", job, loop.time() + timeout_s, loop.create_future())
        self.leases[lease.id] = lease
        (self.rollouts if isinstance(job, RolloutJob) else self.quick).put_nowait(lease)
        try:
            async with asyncio.timeout(timeout_s):
                return await lease.result
        finally:
            del self.leases[lease.id]

    def give_up(self, reason: str) -> None:
        """Fails the rollouts that wait for a worker."""
        while not self.rollouts.empty():
            lease = self.rollouts.get_nowait()
            if not lease.result.done():
                lease.result.set_result(JobFailed(lease.id, reason))
