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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from shoal import wire
from shoal.checker import Spec, task_spec
from shoal.config import RewardConfig
from shoal.errors import ChildDied, SandboxUnavailable, TaskError
from shoal.net.process import Child
from shoal.reward.messages import AnswerVerdict, Batch, WorkerReady
from shoal.sandbox.command import WORK_FOLDER, installed_packages, module_command, own_package
from shoal.sandbox.program import Backend, Program
from shoal.sandbox.runner import strongest
from shoal.types import EXHAUSTED, Reward, RewardStatus, Task

WORKER = "shoal.reward.worker"
START_TIMEOUT_S = 120.0
PREPARE_TIMEOUT_S = 30.0
WALL_PER_CPU = 8.0
"""Wall seconds allowed per second of an answer's processor time; beyond them the machine stands still."""
RETRIES = 1
"""Number of further workers that get an answer whose worker died."""
START_RETRIES = 3
START_DELAY_S = 0.25
"""Seconds before the first of several starts; each next wait is twice as long."""
RECYCLE_AFTER = 20_000
"""Number of answers that a worker scores before it is replaced."""
WINDOW = 4096
"""Number of latest answers and groups in the percentiles."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
KILLED_BY_BOUND = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
"""Exit codes of a worker killed for a judgement that ignored signals: by itself, and within a sandbox."""


class _Exhausted(ChildDied):
    """The kernel ended the worker, because one answer used up its processor time."""


@dataclass(frozen=True, slots=True)
class ScorerStats:
    """Counts since the start; times are percentiles over the latest groups (queue) and answers (run)."""

    scored: int
    timed_out: int
    failed: int
    restarts: int
    queue_p50_s: float
    queue_p99_s: float
    run_p50_s: float
    run_p99_s: float


@dataclass(slots=True)
class _Slot:
    """The place of one worker; empty after a kill until a worker is needed."""

    worker: "_Worker | None" = None
    started: int = 0
    scored: int = 0
    """Number of answers that its worker has scored."""


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

    def fail(self, reason: str) -> None:
        """Gives up the answer being scored, or all answers when their task could not be prepared."""
        for index in self.pending[:1] if self.prepared else self.pending:
            self.rewards[index] = Reward(0.0, RewardStatus.FAILED, evidence=reason)

    def exhaust(self, cpu_s: float) -> None:
        """Gives the answer being scored its 0."""
        self.rewards[self.pending[0]] = exhausted(cpu_s)

    def died(self, reason: str) -> None:
        """Counts a worker's death against the answer being scored, and gives the answer up after too many."""
        index = self.pending[0] if self.prepared else -1
        self.deaths[index] = self.deaths.get(index, 0) + 1
        if self.deaths[index] > RETRIES:
            self.fail(reason)


class WorkerScorer:
    """A `Scorer` on `config.workers` processes. Use as an async context manager.

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
        """`log` takes all that workers write before they are ready, such as why a worker cannot start.

        Without `boxed`, workers confine themselves, as they also do where there are no namespaces.
        """
        self._recycle_after = recycle_after
        self._timeout_s = config.timeout_s
        self._log = log
        self._boxed = boxed
        self._rung: Backend | None = None
        self._slots = [_Slot() for _ in range(config.workers)]
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._ended: list[_Worker] = []
        self._counts = dict.fromkeys(RewardStatus, 0)
        self._queue_s: deque[float] = deque(maxlen=WINDOW)
        self._run_s: deque[float] = deque(maxlen=WINDOW)

    async def start(self) -> None:
        """Starts the workers; returns when all are ready. Raises `ChildDied` when one cannot start."""
        if self._boxed:
            with contextlib.suppress(SandboxUnavailable):
                self._rung = await asyncio.to_thread(strongest)
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._worker(slot))
        except* ChildDied as errors:
            await self.aclose()
            raise errors.exceptions[0] from None
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def aclose(self) -> None:
        """Ends the workers, also in the middle of an answer."""
        for slot in self._slots:
            self._discard(slot)
        await self._reap()

    async def __aenter__(self) -> "WorkerScorer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready or at work."""
        return [slot.worker.pid for slot in self._slots if slot.worker]

    @property
    def stats(self) -> ScorerStats:
        """Statistics for metrics."""
        return ScorerStats(
            self._counts[RewardStatus.SCORED],
            self._counts[RewardStatus.TIMED_OUT],
            self._counts[RewardStatus.FAILED],
            sum(max(slot.started - 1, 0) for slot in self._slots),
            percentile(self._queue_s, 0.5),
            percentile(self._queue_s, 0.99),
            percentile(self._run_s, 0.5),
            percentile(self._run_s, 0.99),
        )

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order, by the task's own checker."""
        try:
            return await self.score_by(task_spec(task), task, answers)
        except TaskError as error:
            self._counts[RewardStatus.FAILED] += len(answers)
            return [Reward(0.0, RewardStatus.FAILED, evidence=str(error))] * len(answers)

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
            self._recycle(slot, len(answers))
        finally:
            self._idle.put_nowait(slot)
        rewards = [work.rewards[index] for index in range(len(answers))]
        for reward in rewards:
            self._counts[reward.status] += 1
        return rewards

    async def _progress(self, slot: _Slot, work: _Work) -> None:
        """Scores with one worker until all answers are done or the worker is lost."""
        worker = await self._worker(slot)
        work.prepared = False
        try:
            await self._exchange(worker, work)
        except TimeoutError:
            self._discard(slot)
            if work.prepared:
                evidence = f"no verdict within {WALL_PER_CPU * self._timeout_s:g} s"
                work.rewards[work.pending[0]] = Reward(0.0, RewardStatus.TIMED_OUT, evidence=evidence)
            else:
                work.fail(f"the task was not prepared within {PREPARE_TIMEOUT_S:g} s")
        except _Exhausted:
            self._discard(slot)
            work.exhaust(self._timeout_s)
        except ChildDied as error:
            self._discard(slot)
            work.died(str(error))
        except BaseException:  # cancelled between question and answer: the worker's next words are nobody's
            self._discard(slot)
            raise

    async def _exchange(self, worker: "_Worker", work: _Work) -> None:
        """Exchanges one batch. Raises `TimeoutError` or `ChildDied`; the rewards that came before stand."""
        pending, task = work.pending, work.task
        answers = [work.answers[index] for index in pending]
        batch = Batch(work.spec, task.receipt, task.answer, task.info, answers, self._timeout_s)
        worker.send(wire.encode(batch))
        ready = wire.decode(await worker.receive(PREPARE_TIMEOUT_S), WorkerReady)
        if ready.error:
            work.fail(ready.error)
            return
        work.prepared = True
        now = asyncio.get_running_loop().time
        for index in pending:
            began = now()
            verdict = wire.decode(await worker.receive(WALL_PER_CPU * self._timeout_s), AnswerVerdict)
            self._run_s.append(now() - began)
            if verdict.exhausted:
                work.exhaust(self._timeout_s)
                continue
            status = RewardStatus.FAILED if verdict.error else RewardStatus.SCORED
            work.rewards[index] = Reward(verdict.value, status, evidence=verdict.error or verdict.evidence)

    async def _worker(self, slot: _Slot) -> "_Worker":
        """The slot's worker, started if there is none."""
        await self._reap()
        for attempt in range(START_RETRIES + 1):
            if slot.worker is not None:
                break
            worker = await self._start_worker()
            try:
                await worker.receive(START_TIMEOUT_S)
                slot.worker = worker
            except BaseException as error:
                worker.kill()
                self._ended.append(worker)
                if isinstance(error, TimeoutError):
                    raise ChildDied(f"a reward worker was not ready after {START_TIMEOUT_S:g} s") from None
                if not isinstance(error, ChildDied) or not worker.was_killed or attempt == START_RETRIES:
                    raise
                continue
            slot.started += 1
            slot.scored = 0
        assert slot.worker is not None
        return slot.worker

    async def _start_worker(self) -> "_Worker":
        """Starts a worker's process.

        A machine out of processes or descriptors gets a bounded number of further attempts.
        """
        for attempt in range(START_RETRIES + 1):
            worker = _Worker(self._log, self._rung)
            try:
                await worker.__aenter__()
                break
            except OSError as error:
                if attempt == START_RETRIES:
                    raise ChildDied(f"a reward worker could not be started: {error}") from None
                await asyncio.sleep(START_DELAY_S * 2**attempt)
        return worker

    def _recycle(self, slot: _Slot, answers: int) -> None:
        """Ends a worker that has scored many answers, because its libraries keep something of each."""
        slot.scored += answers
        if slot.scored >= self._recycle_after:
            self._discard(slot)

    def _discard(self, slot: _Slot) -> None:
        """Kills the slot's worker."""
        if slot.worker is not None:
            slot.worker.kill()
            self._ended.append(slot.worker)
            slot.worker = None

    async def _reap(self) -> None:
        """Waits until the killed workers are gone."""
        while self._ended:
            worker = self._ended[-1]
            await worker.end()
            if worker in self._ended:  # another caller may have waited for the same
                self._ended.remove(worker)


class _Worker(Child):
    """A running `python -m shoal.reward.worker`, whose environment has only the paths of its caches."""

    def __init__(self, log: Path, backend: Backend | None) -> None:
        caches = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")  # of matplotlib's fonts: 1 s of every start otherwise
        env = {name: os.environ[name] for name in caches if name in os.environ}
        env |= {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__("reward worker", WORKER, [], log, env)
        self._rung = backend

    def command(self, fd: int) -> list[str]:
        """The worker's command, within namespaces where the machine has them; elsewhere the worker confines itself."""
        if self._rung not in (Backend.BUBBLEWRAP, Backend.NAMESPACES):
            return super().command(fd)
        module = Program(
            argv=("python", "-s", "-S", "-B", "-P", "-m", WORKER, "--boxed", "--fd", str(fd)),
            packages=(*installed_packages(), own_package().parent),
            environment={**self._env, "HOME": WORK_FOLDER, "TMPDIR": WORK_FOLDER, "MPLCONFIGDIR": WORK_FOLDER},
        )
        return module_command(self._rung, module)

    @property
    def was_killed(self) -> bool:
        """The error of a worker's end, which tells the kernel's bound on processor time from all other ends."""
        return self._process.returncode in KILLED

    async def _death(self) -> ChildDied:
        """The reward of an answer on which its checker used up its processor time."""
        death = await super()._death()
        return _Exhausted(str(death)) if self._process.returncode in KILLED_BY_BOUND else death


def exhausted(cpu_s: float) -> Reward:
    """The value that `share` of all values are at or below; 0 without values."""
    return Reward(0.0, parts=((EXHAUSTED, 1.0),), evidence=f"more than {cpu_s:g} s of processor time")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at or below; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
