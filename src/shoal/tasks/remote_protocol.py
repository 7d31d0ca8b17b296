"""The protocol of environments in other processes: messages over one WebSocket per worker, and who does what. Pure.

A worker connects to the run; the run never calls a worker, which may therefore sit behind any firewall. The connection
is the lease of all jobs that the worker has: when it breaks, others get them. `remote_server` is the other end.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, TypeAlias

import msgspec

from shoal.errors import TaskError
from shoal.types import Outcome, Reward, Split, Task

PROTOCOL = 2
PATH = "/v1/work"
LEASE_S = 5.0
"""Seconds of silence after which either side closes the connection: both answer pings."""
TOKEN_VARIABLE = "SHOAL_TASKS_TOKEN"
"""Name of the environment variable with the run's token, read by the run and by its workers."""

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
    """Seconds from now after which nobody waits for the result."""


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
    """Nobody waits for a job any more."""

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
    """A submitted job. Invariant: `done` is called at most once, and never after the job was withdrawn."""

    id: str
    service: str
    job: Job
    due_s: float
    done: Callable[[Result], None]
    worker: "Worker | None" = None

    @property
    def plays(self) -> bool:
        """True if the job takes a rollout's place at its worker; draws and scores take none."""
        return isinstance(self.job, RolloutJob)


@dataclass(slots=True, eq=False)
class Worker:
    """A connected worker, and the jobs that it has."""

    hello: Hello
    send: Callable[[Lease | Cancel], None]
    room: int
    """Number of further rollouts that the worker takes."""
    leases: dict[str, Lease] = field(default_factory=dict)


@dataclass(slots=True)
class Service:
    """The workers of one name, and its jobs that no worker has yet."""

    workers: list[Worker] = field(default_factory=list)
    rollouts: deque[Lease] = field(default_factory=deque)
    quick: deque[Lease] = field(default_factory=deque)

    def assign(self) -> None:
        """Leases waiting jobs to the workers with most room, as far as they go."""
        for queue in (self.quick, self.rollouts):
            while queue and self.workers:
                worker = max(self.workers, key=lambda one: one.room)
                if queue[0].plays and worker.room < 1:
                    break
                lease = queue.popleft()
                lease.worker, worker.leases[lease.id] = worker, lease
                worker.room -= lease.plays
                worker.send(lease)


class Registry:
    """The services of a run, and who has which job.

    Invariants: one worker at a time has a job, and one result of a job is taken.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Only services of these names may register."""
        self.services = {name: Service() for name in names}
        self._numbers = count()

    def join(self, hello: Hello, send: Callable[[Lease | Cancel], None]) -> Worker:
        """Registers a worker, to which `send` gives jobs. Raises `TaskError` for one that is not wanted as it is."""
        if hello.protocol != PROTOCOL:
            raise TaskError(f"protocol: expected {PROTOCOL}, got {hello.protocol}; install the run's version")
        service = self.services.get(hello.name)
        if service is None:
            raise TaskError(f"name: expected one of {', '.join(sorted(self.services))}, got {hello.name!r}")
        for other in (one.hello for one in service.workers):
            if (other.version, other.converses, other.scores) != (hello.version, hello.converses, hello.scores):
                raise TaskError(
                    f"version: {hello.name!r} is served in version {other.version!r}, perhaps with other methods; "
                    "end those processes first"
                )
        worker = Worker(hello, send, hello.max_running)
        service.workers.append(worker)
        service.assign()
        return worker

    def leave(self, worker: Worker) -> None:
        """Removes a worker and gives up its jobs: another attempt may help."""
        self.services[worker.hello.name].workers.remove(worker)
        for lease in list(worker.leases):
            self.result(worker, JobFailed(lease, "the process that had the job is gone", retry=True))

    def submit(self, name: str, job: Job, *, due_s: float, done: Callable[[Result], None]) -> Lease:
        """Gives a job to a worker of `name`, present or future; `done` gets the result, unless it is withdrawn."""
        service, lease = self.services[name], Lease(f"{next(self._numbers):x}", name, job, due_s, done)
        (service.rollouts if lease.plays else service.quick).append(lease)
        service.assign()
        return lease

    def withdraw(self, lease: Lease) -> None:
        """Cancels a job. Cancelling a finished job has no effect."""
        service = self.services[lease.service]
        if lease.worker is None:
            with contextlib.suppress(ValueError):
                (service.rollouts if lease.plays else service.quick).remove(lease)
        elif self._ended(lease.worker, lease.id) is not None:
            lease.worker.send(Cancel(lease.id))

    def result(self, worker: Worker, result: Result) -> None:
        """Takes a result; a late or repeated one is dropped."""
        lease = self._ended(worker, result.lease)
        if lease is not None:
            lease.done(result)

    def give_up(self, name: str, reason: str) -> None:
        """Fails the rollouts that wait for a worker."""
        waiting = self.services[name].rollouts
        while waiting:
            lease = waiting.popleft()
            lease.done(JobFailed(lease.id, reason))

    def _ended(self, worker: Worker, lease_id: str) -> Lease | None:
        lease = worker.leases.pop(lease_id, None)
        if lease is not None:
            worker.room += lease.plays
            self.services[lease.service].assign()
        return lease
