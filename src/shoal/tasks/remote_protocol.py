"""The protocol of task services in other processes: messages and leases. Pure.

A service asks for work; the orchestrator never calls a service. A service may therefore sit behind any firewall. The
registry leases a job to a worker for as long as the worker goes on asking. `remote_server` carries the messages over
HTTP.
"""

import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Annotated, TypeAlias

import msgspec

from shoal.errors import TaskError
from shoal.types import Outcome, Reward, Split, Task

PROTOCOL = 1
BEAT_S = 2.0
"""Seconds; a worker asks for work at least this often, also when it wants no more."""
LEASE_S = 5.0
"""Seconds of silence after which the registry counts a worker as dead and gives up its jobs."""
REDIAL_S = 2.0
"""Seconds of silence that a worker may have after the connection broke on which it waited for work."""
MOST_JOBS = 256
"""Number of jobs in one answer at most."""

TOKEN_VARIABLE = "SHOAL_TASKS_TOKEN"
"""Name of the environment variable with the run's token, read by the orchestrator and by its workers."""

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class UnknownWorker(TaskError):
    """The worker is not registered, or was silent for too long: it registers again (HTTP 404)."""

    http_status = 404


class Capability(StrEnum):
    """The work that a service does itself; the orchestrator does the rest."""

    DRAW = "draw"
    ROLLOUT = "rollout"
    """The service speaks with the model through a session. Without it the orchestrator asks the model one question."""
    SCORE = "score"
    """The service scores answers. Without it a rollout's outcome has its reward, or the task names a checker."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/members: registers one worker of a service. Several workers may serve one name, in one version."""

    name: Name
    version: Word
    capabilities: list[Capability]
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    """Number of rollouts at once."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Seconds that one rollout may take."""
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True):
    """The answer to `Hello`. Knowledge of the id `worker` proves who a worker is."""

    member: str
    beat_s: float
    lease_s: float


class SessionAt(msgspec.Struct, frozen=True):
    """The address and key of a rollout's session. The session records all sampled tokens; the orchestrator ends it."""

    openai_base_url: str
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


Job: TypeAlias = DrawJob | RolloutJob | ScoreJob


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


class Whose(StrEnum):
    """The cause of a failure. Training uses a failure of the policy, and drops a failure of the environment."""

    ENVIRONMENT = "environment"
    POLICY = "policy"


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A job failed, for a reason."""

    lease: str
    whose: Whose
    reason: Word
    retry: bool = False
    """True if another attempt may help."""


Result: TypeAlias = JobTask | JobOutcome | JobScores | JobFailed


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/members/MEMBER/work: the heartbeat, answered when there is work, or after `beat_s`."""

    holding: list[str] = []
    """All leases of the worker, also those with unacknowledged results."""
    max_running: Annotated[int, msgspec.Meta(ge=0, le=65536)] | None = None
    """Number of rollouts at once from now on; 0 takes no more rollouts."""


class Work(msgspec.Struct, frozen=True):
    """The answer to `WorkRequest`. Nobody waits for the `cancelled` leases any more."""

    jobs: list[Job]
    cancelled: list[str]


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/members/MEMBER/results: the results of leased jobs."""

    results: list[Result]


class Acknowledged(msgspec.Struct, frozen=True):
    """The answer to `Results`: the leases whose results were still wanted. A late or repeated result is dropped."""

    taken: list[str]


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker of a job is gone; another attempt may help."""

    reason: str


@dataclass(slots=True)
class _Ticket:
    """A submitted job. Invariant: `done` is called at most once, and never after the job was withdrawn."""

    service: str
    job: Job
    due_s: float
    done: Callable[[Result | Lost], None]
    worker: str = ""
    lease: str = ""


@dataclass(slots=True)
class _Worker:
    id: str
    hello: Hello
    seen_s: float
    due_s: float
    """Time at which the registry counts a silent worker as dead."""
    max_running: int
    leases: dict[str, _Ticket] = field(default_factory=dict)
    rollouts: int = 0
    """Number of rollouts among the leases."""


@dataclass(slots=True)
class _Service:
    """The workers of one service, and its jobs that no worker has yet."""

    workers: dict[str, _Worker] = field(default_factory=dict)
    rollouts: deque[_Ticket] = field(default_factory=deque)
    quick: deque[_Ticket] = field(default_factory=deque)
    """Draws and scores, which take no rollout's place."""

    def queue_of(self, job: Job) -> deque[_Ticket]:
        return self.rollouts if isinstance(job, RolloutJob) else self.quick


class Registry:
    """The registry of task services: their workers, and the worker of each job. Times are seconds of any one clock.

    Invariants: one worker at a time has the lease of a job, and one result of a job is taken. A lease is given up when
    its worker does not hold it, or was silent for too long.
    """

    def __init__(self, names: Collection[str], *, lease_s: float = LEASE_S) -> None:
        """Only services of these names may register."""
        self._services = {name: _Service() for name in names}
        self._workers: dict[str, _Worker] = {}
        self._lease_s = lease_s
        self._numbers = count()
        self.on_workers: Callable[[str, int], None] = lambda name, workers: None
        """Called with a service and its number of workers, when a worker came or went."""
        self.on_work: Callable[[str], None] = lambda worker: None
        """Called with a worker's id when there may be a job or a cancellation for it."""

    def join(self, hello: Hello, now_s: float) -> str:
        """Registers a worker and returns its id. Raises `TaskError` for a service that is not wanted as it is."""
        if hello.protocol != PROTOCOL:
            raise TaskError(f"protocol: expected {PROTOCOL}, got {hello.protocol}; install the orchestrator's version")
        service = self._services.get(hello.name)
        if service is None:
            raise TaskError(f"name: expected one of {', '.join(sorted(self._services))}, got {hello.name!r}")
        for other in service.workers.values():
            if (other.hello.version, other.hello.capabilities) != (hello.version, hello.capabilities):
                raise TaskError(
                    f"version: {hello.name!r} is served in version {other.hello.version!r} with "
                    f"{', '.join(other.hello.capabilities)} at the moment; end those processes first"
                )
        worker = _Worker(secrets.token_urlsafe(18), hello, now_s, now_s + self._lease_s, hello.max_running)
        self._workers[worker.id] = service.workers[worker.id] = worker
        self.on_workers(hello.name, len(service.workers))
        return worker.id

    def renew(self, worker_id: str, ask: WorkRequest, now_s: float) -> None:
        """Renews a worker's leases. A lease that the worker does not hold never arrived, and is given up.

        Raises `UnknownWorker`.
        """
        worker = self._worker(worker_id)
        worker.seen_s, worker.due_s = now_s, now_s + self._lease_s
        if ask.max_running is not None:
            worker.max_running = ask.max_running
        for lease in worker.leases.keys() - set(ask.holding):
            self._give_up(worker, lease, "the answer that carried it did not arrive")

    def on_disconnect(self, worker_id: str, now_s: float) -> None:
        """Shortens a worker's silence, because the connection broke on which it waited for work."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.due_s = min(worker.due_s, now_s + REDIAL_S)

    def work(self, worker_id: str, holding: Sequence[str], now_s: float) -> Work:
        """Leases waiting jobs to a worker. Raises `UnknownWorker`."""
        worker = self._worker(worker_id)
        cancelled = [lease for lease in holding if lease not in worker.leases]
        service = self._services[worker.hello.name]
        jobs: list[Job] = []
        while service.quick and len(jobs) < MOST_JOBS:
            jobs.append(self._lease(worker, service.quick.popleft(), now_s))
        while service.rollouts and len(jobs) < MOST_JOBS and worker.rollouts < worker.max_running:
            jobs.append(self._lease(worker, service.rollouts.popleft(), now_s))
        return Work(jobs, cancelled)

    def results(self, worker_id: str, results: Sequence[Result]) -> list[str]:
        """Takes results and returns the leases that were still wanted. Raises `UnknownWorker`."""
        worker = self._worker(worker_id)
        taken = []
        for result in results:
            ticket = self._release(worker, result.lease)
            if ticket is not None:
                taken.append(result.lease)
                ticket.done(result)
        self.on_work(worker_id)  # there is room for more
        return taken

    def leave(self, worker_id: str, reason: str = "the service left") -> None:
        """Removes a worker and gives up its jobs."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        service = self._services[worker.hello.name]
        del service.workers[worker_id]
        for lease in list(worker.leases):
            self._give_up(worker, lease, reason)
        self.on_workers(worker.hello.name, len(service.workers))

    def expire(self, now_s: float) -> None:
        """Removes each worker that was silent for too long."""
        for worker in list(self._workers.values()):
            if now_s > worker.due_s:
                self.leave(worker.id, f"the service was silent for {now_s - worker.seen_s:.1f} s")

    def submit(self, name: str, job: Job, *, due_s: float, done: Callable[[Result | Lost], None]) -> _Ticket:
        """Queues a job for the workers of `name`, present or future; `done` gets the result, unless the job is
        withdrawn.
        """
        ticket = _Ticket(name, job, due_s, done)
        service = self._services[name]
        service.queue_of(job).append(ticket)
        for worker_id in service.workers:
            self.on_work(worker_id)
        return ticket

    def withdraw(self, ticket: _Ticket) -> None:
        """Cancels a job. Cancelling a finished job has no effect."""
        worker = self._workers.get(ticket.worker)
        if worker is not None and worker.leases.get(ticket.lease) is ticket:
            self._release(worker, ticket.lease)
            self.on_work(worker.id)
        elif not ticket.lease:
            queue = self._services[ticket.service].queue_of(ticket.job)
            if ticket in queue:
                queue.remove(ticket)

    def workers_of(self, name: str) -> list[Hello]:
        """The workers of a service, as they registered. Any thread may ask for workers and for `max_running`."""
        return [worker.hello for worker in list(self._services[name].workers.values())]

    def max_running_of(self, name: str) -> int:
        """Number of rollouts at once, of all workers of a service together."""
        return sum(worker.max_running for worker in list(self._services[name].workers.values()))

    def load_of(self, name: str) -> tuple[int, int]:
        """Number of jobs of a service that wait for a worker, and number that are leased."""
        service = self._services[name]
        leased = sum(len(worker.leases) for worker in service.workers.values())
        return len(service.rollouts) + len(service.quick), leased

    def __iter__(self) -> Iterator[str]:
        """The names of the services that may register."""
        return iter(self._services)

    def _worker(self, worker_id: str) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise UnknownWorker("member: expected the id of a registered process; POST /v1/members registers one")
        return worker

    def _lease(self, worker: _Worker, ticket: _Ticket, now_s: float) -> Job:
        ticket.worker, ticket.lease = worker.id, f"{next(self._numbers):x}"
        worker.leases[ticket.lease] = ticket
        worker.rollouts += isinstance(ticket.job, RolloutJob)
        return msgspec.structs.replace(ticket.job, lease=ticket.lease, deadline_s=max(ticket.due_s - now_s, 0.0))

    def _release(self, worker: _Worker, lease: str) -> _Ticket | None:
        ticket = worker.leases.pop(lease, None)
        if ticket is not None:
            worker.rollouts -= isinstance(ticket.job, RolloutJob)
        return ticket

    def _give_up(self, worker: _Worker, lease: str, reason: str) -> None:
        ticket = self._release(worker, lease)
        if ticket is not None:
            ticket.done(Lost(reason))
