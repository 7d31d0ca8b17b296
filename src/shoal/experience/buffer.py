"""Groups between generation and training: durable before they are offered, oldest first, each used once."""

import asyncio
import sqlite3
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from shoal.experience import archive, log
from shoal.experience.balance import Balance, Due, TakenGroup, WaitingGroup
from shoal.experience.counts import TaskCounts, read_task_counts
from shoal.experience.gate import AdmissionGate
from shoal.experience.log import LockedLog
from shoal.experience.schema import ConsumedGroup, Recovered, RunMeta, StepRecord
from shoal.experience.turns import GroupTurns, read_left
from shoal.experience.writer import LogWriter
from shoal.interfaces import Follower
from shoal.types import Group, Sample, Task

T = TypeVar("T")

STALE = "stale"
"""The reason of a group whose tokens exceeded `max_staleness` when it could have been consumed."""
TOO_FEW = "half of the rollouts or more failed"
"""The reason of a group that finished with too little to train on."""


class Buffer:
    """The experience log of a run with the gates before and behind it. One event loop, one taker.

    Invariants:
    - A group is committed before `take` returns it, at most once in the life of a run; the log refuses a second use.
    - `take` returns each task's groups in the order of their oldest sampled token, then in commit order. Among tasks it
      keeps to `balance`; without a balance the oldest of all groups come first.
    - With the policy "drop", no returned group has a token older than `max_staleness` Versions. With "mask_tokens" and
      "train", late groups are returned too. With "mask_tokens" the caller masks every token of a Version below
      `version - max_staleness`, and groups without any other token are dropped.
    - A group with at least half of its rollouts failed is never offered (GLM-5, arXiv 2602.15763, 4.1.2).
    """

    def __init__(self, opened: LockedLog, meta: RunMeta, *, max_running: int, threaded: bool = True) -> None:
        self.gate = AdmissionGate(
            meta.staleness,
            groups_per_step=meta.groups_per_step,
            push_every=meta.push_every,
            max_running=max_running,
        )
        self._waiting: list[WaitingGroup] = []
        self._balance = Balance()
        self._taken: dict[str, TakenGroup] = {}
        self._running: dict[str, str] = {}  # group id -> task service
        self._horizon = 0
        self._last_step = -1
        self._taking, self._starting = asyncio.Lock(), asyncio.Lock()
        self._offered, self._more_room = asyncio.Event(), asyncio.Event()
        self._failure: Exception | None = None
        self.wasted_tokens: Counter[str] = Counter()
        """Number of tokens sampled for dropped groups since this process began, by task service."""
        self.on_room: Callable[[], None] = lambda: None
        """Is called whenever there may be more room than before."""
        self.on_finished: Callable[[Group], None] = lambda group: None
        """Is called with every usable group as soon as it is durable, and returns at once."""
        self.followers: dict[str, Follower] = {}
        """Followers of usable groups, by task service."""
        self._opened = opened
        self.counts: defaultdict[str, TaskCounts]
        """Per task service."""
        self.recovered, self.counts = self._recover(opened, meta)
        self._writer = LogWriter(opened, on_failure=self.fail_waiting, threaded=threaded)

    @classmethod
    def open(cls, run_dir: Path, meta: RunMeta, *, max_running: int, resume: bool = False) -> "Buffer":
        """Opens the buffer of a run directory; `recovered` is the state at its last end. Raises `RunDirError`.

        At most `max_running` groups run at once. Opening blocks while it reads the log.
        """
        opened = log.open_log(run_dir, meta, resume=resume)
        try:
            return cls(opened, meta, max_running=max_running)
        except BaseException as error:
            opened.close()
            raise log.unusable(opened.path, error) if isinstance(error, sqlite3.Error) else error from error

    @classmethod
    def in_memory(cls, meta: RunMeta, *, max_running: int) -> "Buffer":
        """A buffer without a thread or a file: every write happens at once, for virtual clocks."""
        return cls(log.memory_log(meta), meta, max_running=max_running, threaded=False)

    @property
    def waiting(self) -> int:
        """Number of groups on offer."""
        return len(self._waiting)

    def run_at_most(self, groups: int) -> None:
        """Bounds the number of running groups from now on; groups beyond it go on."""
        self.gate.max_running = groups
        self._wake_starters()

    def on_locked(self, on_event: Callable[[bool], None]) -> None:
        """Calls `on_event` with True when another program's lock stops writing to the log, and with False after."""
        self._writer.on_locked = on_event

    def balance(self, due: Due) -> None:
        """Keeps the trained groups of each task to `due`; call again when `due` changes."""
        self._balance.due = due
        self._offered.set()

    def follow(self, service: str, follower: Follower) -> None:
        """Has a follower take a task's usable groups: its newest in the log now, then each that becomes durable.

        Blocks while it reads, so follow before the loop is busy.
        """
        if self._opened.lock is not None:  # a log in memory has no earlier groups
            with log.snapshot(self._opened.path.parent) as connection:
                for group in log.usable_groups(connection, service, follower.memory):
                    follower.answered(group)
        self.followers[service] = follower

    async def admit(self, group_id: str, service: str) -> int:
        """Waits until one more group may start; returns its Version of admission. First come, first served.

        Every admitted group must be ended with `add` or `fail`.
        """
        if group_id in self._running:
            raise ValueError(f"group {group_id!r} is running already")
        async with self._starting:  # which lets callers pass in the order in which they came
            while self.gate.capacity < 1 and self._failure is None:
                self._more_room.clear()
                await self._more_room.wait()
            if self._failure is not None:
                raise self._failure
            version = self.gate.admit()
        self._running[group_id] = service
        self.counts[service].started += 1
        at = version, self._last_step
        self._writer.post(lambda c: log.insert_started(c, group_id, service, at))
        return version

    async def turns(self, group_id: str, task: Task) -> GroupTurns:
        """The finished turns of a running group, and the way to log further ones until it ends."""
        turns = GroupTurns(group_id, task, self._running, self._writer.post)
        if any(one.group_id == group_id for one in self.recovered.begun):
            await self._writer.commit(partial(read_left, turns=turns))
        return turns

    async def add(self, group: Group) -> bool:
        """Commits a group that ran; it is durable on return. False when too few of its rollouts are usable.

        The commit happens even if the caller is cancelled.
        """
        service = self._end_running(group.id)
        after = self._last_step
        usable = group.usable

        def write(connection: sqlite3.Connection) -> int:
            seq = log.insert_group(connection, group, after)
            if not usable:
                log.insert_ended(connection, [group.id], "failed", TOO_FEW, after)
            return seq

        if usable:
            await self._writer.commit(write, partial(self._offer, group, service))
        else:
            self._record_failure(service, TOO_FEW)
            await self._writer.commit(write)
        return usable

    async def fail(self, group_id: str, reason: str) -> None:
        """Ends a running group without a result. Its budget is free at once."""
        service = self._end_running(group_id)
        after = self._last_step
        self._record_failure(service, reason)
        await self._writer.commit(lambda c: log.insert_ended(c, [group_id], "failed", reason, after))

    async def take(self, n: int, version: int) -> list[Group]:
        """Waits for `n` groups that may be trained under `version`, in the order of the class invariants.

        Each group must then be passed to `consumed` or `drop`; after a crash it is offered again otherwise.
        """
        assert not self._taking.locked(), "two tasks take groups at once"
        async with self._taking:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._drop_late(version)
                choice = self._balance.next(self._waiting, n, self._used(), asyncio.get_running_loop().time())
                if choice.groups:
                    break
                self._offered.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(choice.wait_s):
                        await self._offered.wait()
        chosen = {one.group.id for one in choice.groups}
        self._waiting = [one for one in self._waiting if one.group.id not in chosen]
        self._taken.update({one.group.id: TakenGroup(one, version, self._horizon) for one in choice.groups})
        return [one.group for one in choice.groups]

    async def consumed(
        self,
        step: int,
        version: int,
        group_ids: Sequence[str],
        *,
        version_after: int,
        external: Sequence[Group] = (),
        rows: Mapping[str, Sequence[Sample]] | None = None,
    ) -> None:
        """Records, in one transaction, that `step` trains these groups, in this order, under `version`.

        The `external` groups, which peers sampled, follow: they enter the log here, were never on offer and pass no
        gate. `rows` are the trainer's rows of each group, by id: the log counts their masked late tokens.

        `version_after` is `version + 1` when the step ends with a new Version. Await the record before any engine loads
        that Version: a log with the step can replay it, so no token sampled from these weights is orphaned.
        """
        if step <= self._last_step or version_after not in (version, version + 1):
            raise ValueError(
                f"step {step}, versions {version} -> {version_after}: expected a step after {self._last_step} "
                f"and at most one new version"
            )
        taken = self._taken_of(group_ids)
        if any(one.version != version for one in taken):
            raise ValueError(f"step {step}: groups were taken for another version than {version}")
        masked = self.gate.staleness.masked_below(version)
        used = [one.use(rows[one.waited.group.id] if rows else (), masked) for one in taken]
        for one in taken:
            self.counts[one.waited.service].consumed += 1
            del self._taken[one.waited.group.id]
        if any(not group.external or group.oldest_version > version for group in external):
            raise ValueError(f"step {step}: expected external groups of version {version} or older")
        for group in external:
            self.counts[group.task.service].external += 1
        after, self._last_step = self._last_step, step
        record = StepRecord(step, version, version_after)

        def write(connection: sqlite3.Connection) -> None:
            foreign = []
            for group in external:
                at = group.admitted_version, after
                log.insert_started(connection, group.id, group.task.service, at, group.origin)
                seq = log.insert_group(connection, group, after)
                foreign.append(ConsumedGroup(seq, seq, group.oldest_version))
            log.insert_step(connection, record, [*used, *foreign])

        await self._writer.commit(write)

    async def hand_out(self, group_ids: Sequence[str], version: int) -> None:
        """Records taken groups as used by a loop of the user's own, and forgets all contents that no step needs."""
        await self.consumed(self._last_step + 1, version, group_ids, version_after=version)
        await self._writer.commit(log.forget_ended)

    def fail_waiting(self, error: Exception) -> None:
        """Fails everything that waits for groups or room, because no group will come any more."""
        self._failure = self._failure or error
        self._offered.set()
        self._more_room.set()

    async def drop(self, group_ids: Sequence[str], reason: str) -> None:
        """Gives up taken groups that will not be trained on; others may start in their place."""
        groups = [one.waited.group for one in self._taken_of(group_ids)]
        for group in groups:
            del self._taken[group.id]
        self._record_dropped(groups, reason)
        await self._writer.commit(lambda _: None)

    def on_loaded(self, version: int) -> None:
        """Notes that every engine has loaded `version`: more groups may start."""
        self.gate.on_loaded(version)
        self._wake_starters()

    async def record_version(self, version: int, checksum: str) -> bool:
        """Records a Version's checksum. False when an earlier record of it differs: a replay was not exact."""
        return await self._writer.commit(lambda c: log.insert_version(c, version, checksum))

    async def record_weights(self, step: int, weights: str) -> bool:
        """Records the weights after a step. False when an earlier record of them differs: a replay was not exact."""
        return await self._writer.commit(lambda c: log.insert_weights(c, step, weights))

    async def sync(self) -> None:
        """Makes all commits survive the loss of power, in one file.

        Await it before a checkpoint gets its name: a checkpoint must never hold more steps than the log.
        """
        await self._writer.sync()

    async def steps_after(self, step: int = -1) -> list[StepRecord]:
        """The recorded steps after `step`, in order: a checkpoint of `step` does not hold them."""
        return await self._read(lambda connection: log.read_steps(connection, step), step + 1)

    async def groups_of(self, step: int) -> list[Group]:
        """The groups of a recorded step, in training order."""
        return await self._read(lambda connection: log.read_step(connection, step), step)

    async def archive(self, through: int) -> None:
        """Moves the rows of the steps up to `through` into files, which all readers see; other writes go on."""
        while (shard := await asyncio.to_thread(archive.write, self._opened.path.parent, through)) is not None:
            await self._writer.commit(partial(archive.forget, shard=shard))
            while await self._writer.alone(archive.vacuum):
                pass

    async def _read(self, query: Callable[[sqlite3.Connection], T], first_step: int) -> T:
        """Rows of a query over the steps from one on; over the whole log when some of them are archived."""
        if first_step > await self._writer.commit(archive.archived_through):
            return await self._writer.commit(query)
        return await asyncio.to_thread(log.read, self._opened.path.parent, query)

    async def close(self) -> None:
        """Waits for pending writes and closes the log. Groups in flight stay in flight in the log."""
        await self._writer.close()

    def _recover(self, opened: LockedLog, meta: RunMeta) -> tuple[Recovered, defaultdict[str, TaskCounts]]:
        """Fills the buffer and the gate from the log; where the run left off, and what became of each task's groups."""
        connection = opened.connection
        steps = log.read_steps(connection)
        last = steps[-1] if steps else None
        self._last_step = last.step if last else -1
        interrupted = log.interrupt_in_flight(connection, self._last_step)
        for seq, group in log.read_waiting(connection):
            insort(self._waiting, WaitingGroup(group.oldest_version, seq, group))
            self._horizon = seq
        begun = log.read_begun(connection)
        self._running.update((one.group_id, one.task.service) for one in begun)
        version = last.version_after if last else 0
        with opened.whole() as whole:
            used = log.count_used(whole)
            counts = read_task_counts(whole)
        self.gate.recover(version=version, accepted=used + len(self._waiting), running=len(begun))
        return Recovered(last.step if last else None, version, len(self._waiting), interrupted, begun), counts

    def _wake_starters(self) -> None:
        self.on_room()
        self._more_room.set()

    def _end_running(self, group_id: str) -> str:
        """Forgets a running group and returns its service."""
        if group_id not in self._running:
            raise ValueError(f"group {group_id!r} is not running: it was never admitted, or it has ended")
        return self._running.pop(group_id)

    def _taken_of(self, group_ids: Sequence[str]) -> list[TakenGroup]:
        """The taken groups, by id. Raises `ValueError` for a group that was not taken, or was used since."""
        for group_id in group_ids:
            if group_id not in self._taken:
                raise ValueError(f"group {group_id!r} was not taken, or it was used before")
        if len(set(group_ids)) < len(group_ids):
            raise ValueError("a group is named twice")
        return [self._taken[group_id] for group_id in group_ids]

    def _offer(self, group: Group, service: str, seq: int) -> None:
        """Offers a group. Called in commit order, after the commit: `take` could choose any group up to `_horizon`."""
        self.gate.accept()
        self.counts[service].finished += 1
        self._horizon = seq
        insort(self._waiting, WaitingGroup(group.oldest_version, seq, group))
        if (follower := self.followers.get(service)) is not None:
            follower.answered(group)
        self._balance.delivered(service)
        self._wake_starters()
        self._offered.set()
        self.on_finished(group)

    def _drop_late(self, version: int) -> None:
        """Drops the groups without a token that may be trained under `version`."""
        if not self._waiting or self._waiting[0].oldest_version >= self.gate.staleness.oldest(version):
            return
        late, kept = list[WaitingGroup](), list[WaitingGroup]()
        for one in self._waiting:
            is_late = self.gate.staleness.refuses(one.oldest_version, one.newest_version, version)
            (late if is_late else kept).append(one)
        self._waiting = kept
        self._record_dropped([one.group for one in late], STALE)

    def _record_dropped(self, groups: Sequence[Group], reason: str) -> None:
        """Frees the budget of groups that had finished."""
        for group in groups:
            counts = self.counts[group.task.service]
            counts.finished -= 1
            counts.dropped[reason] += 1
            self.wasted_tokens[group.task.service] += sum(rollout.sampled_tokens for rollout in group.rollouts)
            self.gate.drop()
        ids, after = [group.id for group in groups], self._last_step
        if ids:
            self._writer.post(lambda c: log.insert_ended(c, ids, "dropped", reason, after))
        self._wake_starters()

    def _record_failure(self, service: str, reason: str) -> None:
        """Frees the budget of a group that was running."""
        self.gate.fail()
        self.counts[service].failed[reason] += 1
        self._wake_starters()

    def _used(self) -> Counter[str]:
        """Groups of each task that were consumed or are being trained on."""
        used = Counter({name: one.consumed for name, one in self.counts.items()})
        used.update(one.waited.service for one in self._taken.values())
        return used
