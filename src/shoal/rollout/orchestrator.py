"""Keeps the engine fed: draws tasks, runs a group on each, and hands finished groups to the buffer.

One loop starts groups, one coroutine each, for as long as the staleness gate has room and a task service that is
below its quota has a question ready. A group waits for its own engine and scorer only; a service that is slow to draw,
or hangs, has nothing ready and delays no other task. Nothing here waits for training, saving or evaluation.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from shoal.errors import TaskError
from shoal.experience.buffer import Buffer
from shoal.experience.log import INTERRUPTED
from shoal.experience.schema import Begun
from shoal.interfaces import Environment, TurnsOf
from shoal.rollout.first_failures import FirstFailures
from shoal.rollout.mixture_weights import Adjuster
from shoal.rollout.question_pool import QuestionPool
from shoal.rollout.ratios import Quotas
from shoal.tasks.remote_environment import NO_PROCESS, TaskServer
from shoal.tasks.sdk import EnvironmentFailed
from shoal.types import Group, Rollout, RolloutStatus, Split, Task, seed_for

TOLD_AFTER, GIVEN_UP_AFTER = 16, 256
"""Consecutive unusable groups, over all services, after which the run warns, and after which it ends."""
MOST_TOLD = 16
"""Number of different reasons of failed rollouts that are reported when they first occur."""

CANCELLED = "cancelled from inside: something that its rollouts waited for was cancelled"

BAD_IN_A_ROW = 8
"""Number of failed groups after which an environment of other processes rests."""
REST_S, LONGEST_REST_S = 5.0, 300.0
REDRAW_S, LONGEST_REDRAW_S = 0.5, 60.0
"""Seconds before another question is drawn in place of a failed draw; twice as long each time."""
NO_QUESTION = "no question can be drawn"
ANOTHER = 1 << 32
"""Number added to the index of a question that cannot be drawn: another question takes its place."""


class AnswerTask(Protocol):
    """Answers a task; `turns` has those that are finished."""

    def __call__(self, task: Task, /, *, turns: TurnsOf | None) -> Awaitable[tuple[Rollout, ...]]: ...


@dataclass(slots=True)
class Health:
    """The rests of an environment after failed groups, longer each time. Pure."""

    bad: int = 0
    rests: int = 0

    def ended(self, *, usable: bool) -> float:
        """Notes a group and returns the seconds to rest now, mostly 0."""
        if usable:
            self.bad = self.rests = 0
            return 0.0
        self.bad += 1
        if self.bad < BAD_IN_A_ROW:
            return 0.0
        self.bad, self.rests = 0, self.rests + 1
        return min(REST_S * 2.0 ** (self.rests - 1), LONGEST_REST_S)


@dataclass(slots=True)
class Source:
    """Draws training tasks of an environment and has them answered."""

    environment: Environment
    answer: "AnswerTask"
    groups_at_once: Callable[[], int | None] = lambda: None
    """Number of groups that may run at once now; None leaves it to the gate."""
    health: Health | None = None
    """Has it rest after failed groups; None lets failed groups end the run."""
    pool: QuestionPool | None = None
    """Chooses among a fixed set of questions; None takes them as the environment draws them."""
    on_presence: Callable[[str, bool], None] = lambda name, present: None
    """Called when the environment's share goes to others (False) and comes back (True); set by an orchestrator."""
    _away: set[str] = field(default_factory=set)
    """Reasons for which its share goes to others."""

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.environment.name

    async def draw(self, index: int) -> Task:
        """The training task at `index`, or another one when another attempt may help. Raises `TaskError`."""
        if self.pool is not None:
            return self.pool.draw(index)
        wait_s = REDRAW_S
        while True:
            try:
                task = await self.environment.drawn(Split.TRAIN, index)
            except EnvironmentFailed as error:
                if not error.retry:
                    raise TaskError(f"{self.name}: no question at {index}: {error}") from error
            else:
                self.lend(NO_QUESTION, False)
                return task
            self.lend(NO_QUESTION, True)
            index += ANOTHER
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_REDRAW_S)

    async def rollouts(self, task: Task, turns: TurnsOf | None = None) -> tuple[Rollout, ...]:
        """The rollouts of a task. A failure is a rollout's status and reason, never an exception."""
        try:
            rollouts = await self.answer(task, turns=turns)
        finally:
            if self.pool is not None:
                self.pool.ended(task)
        bad = sum(rollout.status is RolloutStatus.FAILED for rollout in rollouts)
        if self.health is not None and (rest_s := self.health.ended(usable=2 * bad < len(rollouts))):
            self.lend("it rests", True)
            asyncio.get_running_loop().call_later(rest_s, self.lend, "it rests", False)
        return rollouts

    def lend(self, why: str, away: bool) -> None:
        """Notes or removes a reason to lend its share; notifies when the first comes, and when the last goes."""
        before = bool(self._away)
        (self._away.add if away else self._away.discard)(why)
        if bool(self._away) != before:
            self.on_presence(self.name, before)


class Orchestrator:
    """Runs groups until it is cancelled. Every admitted group is added exactly once, unless cancelled before."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Mapping[str, float],
        buffer: Buffer,
        *,
        adjuster: Adjuster | None = None,
        seed: int | None = None,
        post: Callable[[Group], Awaitable[Group]] | None = None,
        on_event: Callable[..., None] = lambda name, **details: None,
    ) -> None:
        """`weights` are the sources', relative; with `seed` they are the chances that a group is of each source.

        `post` maps a finished group to the one that is added.

        `on_event` gets the name and details of each changed weight, of each reason of a failed rollout when it comes
        first, and of many groups in a row that could not be used. Each source goes on drawing where the buffer's counts
        say it stopped: no index is drawn twice.
        """
        self._sources = {source.name: source for source in sources}
        self._buffer = buffer
        self._post = post
        self._on_event = on_event
        self._seen: set[str] = set()
        self._unusable: Counter[str] = Counter()  # by reason, since the last usable group
        self._first = FirstFailures("groups")
        self._adjuster = adjuster
        consumed = {name: buffer.counts[name].consumed for name in self._sources}
        window = buffer.gate.budget - sum(consumed.values())
        rng = None if seed is None else random.Random(seed_for("tasks by chance", seed, sum(consumed.values())))
        self._quotas = Quotas(weights, lend_at_most=window, consumed=consumed, rng=rng)
        self._ready: dict[str, asyncio.Queue[tuple[int, Task]]] = {name: asyncio.Queue(1) for name in self._sources}
        self._quotas_before = {name: self._quotas.quota(name) for name in self._sources}
        self._wake = asyncio.Event()
        self._begun = buffer.recovered.begun
        for source in sources:
            source.on_presence = self.presence

    async def run(self) -> None:
        """Draws and runs groups until cancelled. Raises `TaskError` after too many unusable ones in a row."""
        self._buffer.on_room = self._wake.set
        self._buffer.balance(self._quotas.due)
        async with asyncio.TaskGroup() as groups:
            begun_groups, self._begun = self._begun, ()
            for begun in begun_groups:  # before a pool draws, which must know what runs
                groups.create_task(self._go_on(begun), name=f"group {begun.group_id}")
            for source in self._sources.values():
                groups.create_task(self._keep_drawn(source), name=f"drawing {source.name}")
            while True:
                self._wake.clear()
                while await self._start_one(groups):
                    pass
                self._look()
                await self._wake.wait()

    def presence(self, name: str, present: bool) -> None:
        """Takes a service's coming and going.

        The share of a service that is away goes to the others. Back again, it gets what it missed, within bounds.
        """
        (self._quotas.come if present else self._quotas.leave)(name)
        self._buffer.balance(self._quotas.due)
        self._wake.set()
        self._on_event("service", task=name, state="there" if present else "away")

    def wake(self) -> None:
        """A source can run more than before."""
        self._wake.set()

    async def _keep_drawn(self, source: Source) -> None:
        """Has the next question of a service at hand, always."""
        index = self._buffer.counts[source.name].started
        while True:
            task = await source.draw(index)
            putting = self._ready[source.name].put((index, task))
            index += 1
            self._wake.set()
            await putting
            self._wake.set()

    async def _start_one(self, groups: asyncio.TaskGroup) -> bool:
        """Starts the group that is due, if any."""
        self._quotas.grow(self._buffer.gate.budget)
        if self._buffer.gate.capacity < 1:
            return False
        ready = [name for name, drawn in self._ready.items() if not drawn.empty() and not self._full(name)]
        name = self._quotas.next(self._taken, ready)
        if name is None:
            return False
        index, task = self._ready[name].get_nowait()
        group_id = f"{name}-{index}"
        version = await self._buffer.admit(group_id, name)
        groups.create_task(self._run_group(self._sources[name], group_id, task, version), name=f"group {group_id}")
        return True

    async def _go_on(self, begun: Begun) -> None:
        """Ends a group that was in flight when the run was killed, from its finished turns."""
        source = self._sources.get(begun.task.service)
        if source is None:  # a task that the configuration has no more
            await self._buffer.fail(begun.group_id, INTERRUPTED)
            return
        if source.pool is not None:
            source.pool.began(begun.task)
        await self._run_group(source, begun.group_id, begun.task, begun.admitted_version)

    @property
    def _taken(self) -> dict[str, int]:
        """Groups of each source that take part of its quota: usable ones that were not dropped, and running ones."""
        counts = {name: self._buffer.counts[name] for name in self._sources}
        return {name: one.finished + one.in_flight for name, one in counts.items()}

    def _full(self, name: str) -> bool:
        """True if the source may not run one more group."""
        most = self._sources[name].groups_at_once()
        return most is not None and self._buffer.counts[name].in_flight >= most

    async def _run_group(self, source: Source, group_id: str, task: Task, version: int) -> None:
        place = self._first.started() if source.health is None else None
        try:
            rollouts = await source.rollouts(task, (await self._buffer.turns(group_id, task)).of)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is None or own.cancelling():
                raise
            # A TaskGroup forgets a task that ends so: the group would never end, and would hold its place at the gate.
            await self._buffer.fail(group_id, CANCELLED)
            if place is not None:
                self._first.ended(place, ())
            self._note_unusable([CANCELLED])
            self._wake.set()
            return
        group = Group(group_id, task, rollouts, version)
        group = await self._post(group) if self._post else group
        usable = await self._buffer.add(group)
        if usable and self._adjuster is not None:
            rewards = {rollout.reward.value for rollout in group.finished}
            tokens = sum(rollout.sampled_tokens for rollout in group.rollouts)
            self._adjuster.finished(source.name, informative=len(rewards) > 1, tokens=tokens)
        reasons = [rollout.reason for rollout in group.rollouts if rollout.status is RolloutStatus.FAILED]
        self._tell_new(reasons)
        if place is not None:
            self._first.ended(place, rollouts)
        if usable:
            self._unusable.clear()
        else:
            self._note_unusable(reasons)
        self._wake.set()

    def _tell_new(self, reasons: Sequence[str]) -> None:
        """Reports a failure when it is first seen, so that a user need not wait for the end of the run."""
        for reason in dict.fromkeys(reasons):
            if reason not in self._seen and len(self._seen) < MOST_TOLD:
                self._seen.add(reason)
                self._on_event("rollout_failed", reason=reason)

    def _note_unusable(self, reasons: Sequence[str]) -> None:
        """Ends a run of unusable groups: it trains nothing, however long it goes on."""
        self._unusable.update(reason for reason, _ in Counter(reasons).most_common(1))
        often = next((reason for reason, _ in self._unusable.most_common(1)), "")
        if self._unusable.total() == TOLD_AFTER:
            self._on_event("groups_unusable", reason=often)
        if self._unusable.total() >= GIVEN_UP_AFTER:
            raise TaskError(
                f"expected groups of which most rollouts finish, got {GIVEN_UP_AFTER} in a row that cannot be used; "
                f"most often: {often}; mend that and go on with --resume"
            )

    def _look(self) -> None:
        """Notes the services that hold up the others, and moves the weights when enough groups finished."""
        if self._adjuster is None:
            return
        for name, taken in self._taken.items():
            below = taken < self._quotas.quota(name)
            self._adjuster.looked(name, holding=below and self._full(name) and self._buffer.gate.capacity > 0)
        if not self._adjuster.due:
            return
        quotas = {name: self._quotas.quota(name) for name in self._sources}
        growth = {name: quotas[name] - self._quotas_before[name] for name in self._sources}
        self._quotas_before = quotas
        for change in self._adjuster.adjust(growth):
            self._on_event("ratio", task=change.name, before=change.before, after=change.after, reason=change.reason)
        self._quotas.weigh(self._adjuster.weights)


def attend(server: TaskServer, sources: Sequence[Source], wake: Callable[[], None]) -> None:
    """Notifies the sources, on the calling event loop, whether they are served; `wake` is called too."""
    loop = asyncio.get_running_loop()
    by_name = {source.name: source for source in sources}

    def changed(name: str, served: bool) -> None:
        by_name[name].lend(NO_PROCESS, not served)
        wake()

    def notify(name: str, served: bool) -> None:
        with suppress(RuntimeError):  # the server outlives an event loop that a lost rank has ended
            loop.call_soon_threadsafe(changed, name, served)

    server.on_workers = notify
    for name, service in server.services.items():
        changed(name, service.served.is_set())
