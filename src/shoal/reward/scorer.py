"""Scores answers in worker processes that are killed when an answer takes too long.

"Wrong", "timed out" and "failed" are three outcomes. An answer that uses up its processor time is wrong: the policy
wrote it. An answer that kills its worker costs its group a fresh worker and nothing else. Workers report answer by
answer, so the blame falls on the right answer.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shoal import wire
from shoal.checker import Spec
from shoal.config import RewardConfig
from shoal.errors import ChildDied
from shoal.reward.messages import Batch, exhausted
from shoal.sandbox.boxed_child import BoxedChild
from shoal.sandbox.program import Backend
from shoal.sandbox.runner import in_thread, strongest_if_any
from shoal.types import Reward, RewardStatus, Task

WORKER = "shoal.reward.worker"
START_TIMEOUT_S = 900.0
"""Seconds until a start counts as hung: long, for busy machines; an exit is noticed at once."""
PREPARE_TIMEOUT_S = 30.0
WALL_PER_CPU = 8.0
"""Wall seconds allowed per second of an answer's processor time; beyond them the worker counts as stuck."""
RETRIES = 1
"""Number of retries on a new worker for an answer whose worker died."""
START_RETRIES = 3
START_DELAY_S = 0.25
"""Seconds before the second of several starts; each next wait is twice as long."""
RECYCLE_AFTER = 20_000
"""Number of answers that a worker scores before it is replaced."""
WINDOW = 4096
"""Number of latest answers and groups in the percentiles."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
KILLED_BY_BOUND = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
"""Exit codes of a worker killed for a judgement that ignored signals: by itself, and within a sandbox."""


class _Exhausted(ChildDied):
    """The kernel ended the worker, because one answer used up its processor time."""


@dataclass(slots=True)
class _Slot:
    """The place of one worker; empty after a kill until a worker is needed."""

    worker: "_Worker | None" = None
    started: int = 0
    scored: int = 0
    """Number of answers that its worker has scored."""

    async def discard(self) -> None:
        """Kills the worker and waits until it is gone."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()
            await worker.end()


@dataclass(slots=True)
class _Work:
    """A group being scored."""

    spec: Spec
    task: Task
    answers: Sequence[str]
    rewards: dict[int, Reward] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    prepared: bool = False

    @property
    def pending(self) -> list[int]:
        """Indices of the answers without a reward, in order."""
        return [index for index in range(len(self.answers)) if index not in self.rewards]

    def fail(self, reason: str, status: RewardStatus = RewardStatus.FAILED) -> None:
        """Gives up the answer being scored, or all answers when their task could not be prepared."""
        for index in self.pending[:1] if self.prepared else self.pending:
            self.rewards[index] = Reward(0.0, status, evidence=reason)

    def died(self, reason: str) -> None:
        """Counts a worker's death against the answer being scored, and gives the answer up after too many."""
        index = self.pending[0] if self.prepared else -1
        self.deaths[index] = self.deaths.get(index, 0) + 1
        if self.deaths[index] > RETRIES:
            self.fail(reason)


class WorkerScorer:
    """Scores on `config.workers` processes. Use as an async context manager.

    Invariant: a slot is in `_idle` exactly when no group uses it, and its worker, if any, then has nothing to do.
    """

    def __init__(
        self,
        config: RewardConfig,
        log: Path = Path(os.devnull),
        *,
        recycle_after: int = RECYCLE_AFTER,
        boxed: bool = True,
    ) -> None:
        """`log` gets the workers' output until they are ready, such as why one cannot start.

        Without `boxed`, workers confine themselves, as they also do where there are no namespaces.
        """
        self._recycle_after = recycle_after
        self._timeout_s = config.timeout_s
        self._log = log
        self._boxed = boxed
        self._backend: Backend | None = None
        self._slots = [_Slot() for _ in range(config.workers)]
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._queue_s: deque[float] = deque(maxlen=WINDOW)
        self._run_s: deque[float] = deque(maxlen=WINDOW)

    async def __aenter__(self) -> Self:
        """Starts the workers; returns when all are ready. Raises `ChildDied` when one cannot start."""
        if self._boxed:
            self._backend = await in_thread(strongest_if_any)
        async with contextlib.AsyncExitStack() as failing:
            failing.push_async_callback(self.__aexit__)
            try:
                async with asyncio.TaskGroup() as group:
                    for slot in self._slots:
                        group.create_task(self._worker(slot))
            except* ChildDied as errors:
                raise errors.exceptions[0] from None
            failing.pop_all()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the workers, also in the middle of an answer."""
        await asyncio.gather(*(slot.discard() for slot in self._slots))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready or at work."""
        return [slot.worker.pid for slot in self._slots if slot.worker]

    @property
    def values(self) -> Mapping[str, float]:
        """Metrics: replaced workers, and percentiles in seconds over the latest groups (queue) and answers (run)."""
        times = percentiles("scorer_queue", self._queue_s) | percentiles("scorer_run", self._run_s)
        return {"scorer_restarts": sum(max(slot.started - 1, 0) for slot in self._slots), **times}

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. The deadline of an answer starts when its worker turns to it.

        Raises `ChildDied` when no worker can be started any more.
        """
        now = asyncio.get_running_loop().time
        asked = now()
        slot = await self._idle.get()
        self._queue_s.append(now() - asked)
        work = _Work(spec, task, answers)
        try:
            while work.pending:
                await self._progress(slot, work)
            slot.scored += len(answers)
            if slot.scored >= self._recycle_after:  # its libraries leak memory with each answer
                await slot.discard()
        finally:
            self._idle.put_nowait(slot)
        return [work.rewards[index] for index in range(len(answers))]

    async def _progress(self, slot: _Slot, work: _Work) -> None:
        """Scores with one worker until all answers are done or the worker is lost."""
        worker = await self._worker(slot)
        work.prepared = False
        try:
            await self._exchange(worker, work)
            return
        except TimeoutError:
            if work.prepared:
                work.fail(f"no verdict within {WALL_PER_CPU * self._timeout_s:g} s", RewardStatus.TIMED_OUT)
            else:
                work.fail(f"the task was not prepared within {PREPARE_TIMEOUT_S:g} s")
        except _Exhausted:
            work.rewards[work.pending[0]] = exhausted(self._timeout_s)
        except ChildDied as error:
            work.died(str(error))
        except BaseException:  # cancelled between question and answer: the worker's next reply belongs to no request
            await slot.discard()
            raise
        await slot.discard()

    async def _exchange(self, worker: "_Worker", work: _Work) -> None:
        """Exchanges one batch. Raises `TimeoutError` or `ChildDied`; the rewards that came before stand."""
        pending = work.pending
        answers = [work.answers[index] for index in pending]
        worker.send(wire.encode(Batch(work.spec, work.task, answers, self._timeout_s)))
        if fault := wire.decode(await worker.receive(PREPARE_TIMEOUT_S), str):
            work.fail(fault)
            return
        work.prepared = True
        now = asyncio.get_running_loop().time
        for index in pending:
            began = now()
            work.rewards[index] = wire.decode(await worker.receive(WALL_PER_CPU * self._timeout_s), Reward)
            self._run_s.append(now() - began)

    async def _worker(self, slot: _Slot) -> "_Worker":
        """The slot's worker, started on demand.

        A worker that is killed while it starts, or that a machine out of processes or descriptors refuses, gets a
        bounded number of further starts.
        """
        if slot.worker is not None:
            return slot.worker
        for attempt in range(START_RETRIES + 1):
            if attempt:
                await asyncio.sleep(START_DELAY_S * 2 ** (attempt - 1))
            worker = _Worker(self._log, self._backend)
            try:
                await worker.__aenter__()
            except OSError as error:
                why = ChildDied(f"a reward worker could not be started: {error}")
                continue
            try:
                await worker.ready(START_TIMEOUT_S)
            except BaseException as error:
                worker.kill()
                await worker.end()
                if not isinstance(error, ChildDied) or not worker.was_killed:
                    raise
                why = error
            else:
                slot.worker, slot.started, slot.scored = worker, slot.started + 1, 0
                return worker
        raise why


class _Worker(BoxedChild):
    """A running `python -m shoal.reward.worker`."""

    def __init__(self, log: Path, backend: Backend | None) -> None:
        super().__init__("reward worker", WORKER, [], log, backend)

    @property
    def was_killed(self) -> bool:
        """True if SIGKILL ended the worker."""
        return self._process.returncode in KILLED

    async def _death(self) -> ChildDied:
        """The error of a worker's end, which tells the kernel's bound on processor time from all other ends."""
        death = await super()._death()
        return _Exhausted(str(death)) if self._process.returncode in KILLED_BY_BOUND else death


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The 50th and 99th percentile, as `NAME_p50_s` and `NAME_p99_s`; 0 without values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        f"{name}_p{share}_s": ordered[min(share * len(ordered) // 100, last)] if ordered else 0.0 for share in (50, 99)
    }
