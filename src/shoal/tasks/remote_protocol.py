"""Task services in other processes: what they and the orchestrator tell each other, and who works on what. Pure.

A service asks for work, it is never called: nothing but the orchestrator listens, and a service may sit behind any
firewall. What it is given is leased to it for as long as it goes on asking. `hub` carries this over HTTP.
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
"""A service asks for work at least this often, whether it wants any or not."""
LEASE_S = 5.0
"""After a silence of so long it counts as dead, and others do its work."""
REDIAL_S = 2.0
"""When the connection breaks on which it waits for work, as when it is killed, its silence may only last this long."""
MOST_JOBS = 256
"""Given out in one answer."""

TOKEN_VARIABLE = "SHOAL_TASKS_TOKEN"
"""Of the environment, on both sides: who serves a run's tasks must have the run's token."""

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class UnknownMember(TaskError):
    """Who asks is not registered, or was silent for too long: it has to register again (HTTP 404)."""

    http_status = 404


class Capability(StrEnum):
    """What a service does itself; the orchestrator does the rest."""

    DRAW = "draw"
    ROLLOUT = "rollout"
    """Speaks with the model through a session. Else the orchestrator has the question answered in one turn."""
    SCORE = "score"
    """Else a rollout's outcome has its reward, or the task names a checker."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/members: a process of a service is there. Several processes may serve one name, in one version."""

    name: Name
    version: Word
    capabilities: list[Capability]
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    """Rollouts at once."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Deadline of one rollout."""
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True):
    """Its answer. Whoever knows `member` is that process."""

    member: str
    beat_s: float
    lease_s: float


class SessionAt(msgspec.Struct, frozen=True):
    """Where a rollout's model is. What is drawn there is on the ledger; the orchestrator ends it."""

    openai_base_url: str
    anthropic_base_url: str
    api_key: str


class DrawJob(msgspec.Struct, frozen=True, tag="draw"):
    """The task at an index, please: equal arguments give equal tasks, and the splits share no question."""

    split: Split
    index: int
    lease: str = ""
    deadline_s: float = 0.0
    """From now; nobody waits for what comes later."""


class RolloutJob(msgspec.Struct, frozen=True, tag="rollout"):
    """Work on a task, through a session. A procedural task has its receipt."""

    task: Task
    session: SessionAt
    lease: str = ""
    deadline_s: float = 0.0


class ScoreJob(msgspec.Struct, frozen=True, tag="score"):
    """One reward per answer, in order."""

    task: Task
    answers: list[str]
    lease: str = ""
    deadline_s: float = 0.0


Job: TypeAlias = DrawJob | RolloutJob | ScoreJob


class JobTask(msgspec.Struct, frozen=True, tag="drawn"):
    """What a `DrawJob` gave."""

    lease: str
    task: Task


class Played(msgspec.Struct, frozen=True, tag="played"):
    """What a `RolloutJob` came to."""

    lease: str
    outcome: Outcome


class JobScores(msgspec.Struct, frozen=True, tag="scored"):
    """What a `ScoreJob` gave."""

    lease: str
    rewards: list[Reward]


class Whose(StrEnum):
    """Whose failure it is. What the policy did is trained with; what the environment did is not."""

    ENVIRONMENT = "environment"
    POLICY = "policy"


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing came of a job, and why."""

    lease: str
    whose: Whose
    reason: Word
    retry: bool = False
    """Whether trying again may help."""


Result: TypeAlias = JobTask | Played | JobScores | JobFailed


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/members/MEMBER/work: the heartbeat, answered when there is work, or after `beat_s`."""

    holding: list[str] = []
    """All leases that the process has, those included whose results were not acknowledged yet."""
    max_running: Annotated[int, msgspec.Meta(ge=0, le=65536)] | None = None
    """Another limit from now on; 0 takes no more rollouts."""


class Work(msgspec.Struct, frozen=True):
    """Its answer. Nobody waits for what is cancelled any more."""

    jobs: list[Job]
    cancelled: list[str]


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/members/MEMBER/results."""

    results: list[Result]


class Acknowledged(msgspec.Struct, frozen=True):
    """Its answer: what was still wanted. The rest came too late, or came twice."""

    taken: list[str]


@dataclass(frozen=True, slots=True)
class Lost:
    """Whoever worked on a job is gone; another attempt is worth it."""

    reason: str


@dataclass(slots=True)
class _Ticket:
    """A job that somebody waits for. Invariant: `done` is called once at most, and never after it was withdrawn."""

    service: str
    job: Job
    due_s: float
    done: Callable[[Result | Lost], None]
    member: str = ""
    lease: str = ""


@dataclass(slots=True)
class _Member:
    id: str
    hello: Hello
    heard_s: float
    due_s: float
    """It counts as dead when it is not heard of by then."""
    max_running: int
    leases: dict[str, _Ticket] = field(default_factory=dict)
    rollouts: int = 0
    """Of the leases."""


@dataclass(slots=True)
class _Service:
    """The members of one name, and the work that none of them has yet."""

    members: dict[str, _Member] = field(default_factory=dict)
    rollouts: deque[_Ticket] = field(default_factory=deque)
    quick: deque[_Ticket] = field(default_factory=deque)
    """Draws and scores: they take no rollout's place."""

    def queue_of(self, job: Job) -> deque[_Ticket]:
        return self.rollouts if isinstance(job, RolloutJob) else self.quick


class Registry:
    """Which processes serve which task, and who works on what. Times are seconds of any one clock.

    Invariants: a job is leased to one process at a time, and one result of it is taken; a lease that its process does
    not know of, or whose process was silent for too long, is given up, so that whoever waits can ask again.
    """

    def __init__(self, names: Collection[str], *, lease_s: float = LEASE_S) -> None:
        """Only services of these names are wanted."""
        self._services = {name: _Service() for name in names}
        self._members: dict[str, _Member] = {}
        self._lease_s = lease_s
        self._numbers = count()
        self.on_members: Callable[[str, int], None] = lambda name, members: None
        """Called when a process came or went, with how many its service has now."""
        self.on_work: Callable[[str], None] = lambda member: None
        """Called when there may be something to tell a member."""

    def join(self, hello: Hello, now_s: float) -> str:
        """The new member's id. Raises `TaskError` for a service that is not wanted as it is."""
        if hello.protocol != PROTOCOL:
            raise TaskError(f"protocol: expected {PROTOCOL}, got {hello.protocol}; install the orchestrator's version")
        service = self._services.get(hello.name)
        if service is None:
            raise TaskError(f"name: expected one of {', '.join(sorted(self._services))}, got {hello.name!r}")
        for other in service.members.values():
            if (other.hello.version, other.hello.capabilities) != (hello.version, hello.capabilities):
                raise TaskError(
                    f"version: {hello.name!r} is served in version {other.hello.version!r} with "
                    f"{', '.join(other.hello.capabilities)} at the moment; end those processes first"
                )
        member = _Member(secrets.token_urlsafe(18), hello, now_s, now_s + self._lease_s, hello.max_running)
        self._members[member.id] = service.members[member.id] = member
        self.on_members(hello.name, len(service.members))
        return member.id

    def heard(self, member_id: str, ask: WorkRequest, now_s: float) -> None:
        """A member asks for work. Raises `UnknownMember`. What it was sent and does not hold, it never got."""
        member = self._member(member_id)
        member.heard_s, member.due_s = now_s, now_s + self._lease_s
        if ask.max_running is not None:
            member.max_running = ask.max_running
        for lease in member.leases.keys() - set(ask.holding):
            self._give_up(member, lease, "the answer that carried it did not arrive")

    def hung_up(self, member_id: str, now_s: float) -> None:
        """The connection on which a member waited for work broke."""
        member = self._members.get(member_id)
        if member is not None:
            member.due_s = min(member.due_s, now_s + REDIAL_S)

    def work(self, member_id: str, holding: Sequence[str], now_s: float) -> Work:
        """What there is for a member now; the jobs are leased to it. Raises `UnknownMember`."""
        member = self._member(member_id)
        cancelled = [lease for lease in holding if lease not in member.leases]
        service = self._services[member.hello.name]
        jobs: list[Job] = []
        while service.quick and len(jobs) < MOST_JOBS:
            jobs.append(self._leased(member, service.quick.popleft(), now_s))
        while service.rollouts and len(jobs) < MOST_JOBS and member.rollouts < member.max_running:
            jobs.append(self._leased(member, service.rollouts.popleft(), now_s))
        return Work(jobs, cancelled)

    def results(self, member_id: str, results: Sequence[Result]) -> list[str]:
        """The leases whose results were still wanted; those who wait are told. Raises `UnknownMember`."""
        member = self._member(member_id)
        taken = []
        for result in results:
            ticket = self._released(member, result.lease)
            if ticket is not None:
                taken.append(result.lease)
                ticket.done(result)
        self.on_work(member_id)  # there is room for more
        return taken

    def leave(self, member_id: str, reason: str = "the service left") -> None:
        """A member is gone. What it worked on is given up."""
        member = self._members.pop(member_id, None)
        if member is None:
            return
        service = self._services[member.hello.name]
        del service.members[member_id]
        for lease in list(member.leases):
            self._give_up(member, lease, reason)
        self.on_members(member.hello.name, len(service.members))

    def expire(self, now_s: float) -> None:
        """Gives up those who were silent for too long."""
        for member in list(self._members.values()):
            if now_s > member.due_s:
                self.leave(member.id, f"the service was silent for {now_s - member.heard_s:.1f} s")

    def submit(self, name: str, job: Job, *, due_s: float, done: Callable[[Result | Lost], None]) -> _Ticket:
        """Has a job done by whoever serves `name`, now or later; `done` gets the result, unless it is withdrawn."""
        ticket = _Ticket(name, job, due_s, done)
        service = self._services[name]
        service.queue_of(job).append(ticket)
        for member_id in service.members:
            self.on_work(member_id)
        return ticket

    def withdraw(self, ticket: _Ticket) -> None:
        """Nobody waits for a job any more. It is nothing to withdraw one that is done."""
        member = self._members.get(ticket.member)
        if member is not None and member.leases.get(ticket.lease) is ticket:
            self._released(member, ticket.lease)
            self.on_work(member.id)
        elif not ticket.lease:
            queue = self._services[ticket.service].queue_of(ticket.job)
            if ticket in queue:
                queue.remove(ticket)

    def members_of(self, name: str) -> list[Hello]:
        """What the processes of a service said of themselves. This and the next may be asked from any thread."""
        return [member.hello for member in list(self._services[name].members.values())]

    def max_running_of(self, name: str) -> int:
        """Rollouts that a service's processes take at once, all together."""
        return sum(member.max_running for member in list(self._services[name].members.values()))

    def load_of(self, name: str) -> tuple[int, int]:
        """Jobs of a service that wait for a process, and those that one has."""
        service = self._services[name]
        leased = sum(len(member.leases) for member in service.members.values())
        return len(service.rollouts) + len(service.quick), leased

    def __iter__(self) -> Iterator[str]:
        """The names that are wanted."""
        return iter(self._services)

    def _member(self, member_id: str) -> _Member:
        member = self._members.get(member_id)
        if member is None:
            raise UnknownMember("member: expected the id of a registered process; POST /v1/members registers one")
        return member

    def _leased(self, member: _Member, ticket: _Ticket, now_s: float) -> Job:
        ticket.member, ticket.lease = member.id, f"{next(self._numbers):x}"
        member.leases[ticket.lease] = ticket
        member.rollouts += isinstance(ticket.job, RolloutJob)
        return msgspec.structs.replace(ticket.job, lease=ticket.lease, deadline_s=max(ticket.due_s - now_s, 0.0))

    def _released(self, member: _Member, lease: str) -> _Ticket | None:
        ticket = member.leases.pop(lease, None)
        if ticket is not None:
            member.rollouts -= isinstance(ticket.job, RolloutJob)
        return ticket

    def _give_up(self, member: _Member, lease: str, reason: str) -> None:
        ticket = self._released(member, lease)
        if ticket is not None:
            ticket.done(Lost(reason))
