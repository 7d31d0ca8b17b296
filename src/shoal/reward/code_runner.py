"""Runs jobs in sandboxes, many in one: a sandbox takes 50 ms to set up, a run inside of it 1 ms."""

import asyncio
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from shoal.errors import SandboxUnavailable
from shoal.reward.code import Job, Run
from shoal.reward.in_sandbox import source
from shoal.reward.in_sandbox.driver import EXITED, RECORD, SIGNALLED, TIMED_OUT, TOO_MUCH
from shoal.sandbox import backends
from shoal.sandbox.command import installed_packages
from shoal.sandbox.program import Ended, Finished, Limits, Program, Rung
from shoal.sandbox.runner import run_async

MOST_JOBS = 64
"""In one sandbox."""
MOST_BYTES = 8 << 20
"""Of their programs and inputs together, unless one alone is larger."""
RETRIES = 2
"""How often a sandbox that could not be set up is tried again."""
SLACK_S = 10.0
PROCESSES = 64
FILE_BYTES = 32 << 20
_HEADER = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class _Waiting:
    job: Job
    runs: "asyncio.Future[list[Run]]"


class Boxes:
    """At most `most` sandboxes at once. Jobs that come while all are busy share the next one.

    Each program runs in processes of its own and is gone, with all it left, before the next begins. A program that ends
    the sandbox itself is blamed, and those behind it go into another one.
    """

    def __init__(self, most: int, rung: Rung | None = None) -> None:
        """On the strongest rung of this machine unless one is named."""
        self._most = most
        self._rung = rung
        self._waiting: deque[_Waiting] = deque()
        self._busy: set[asyncio.Task[None]] = set()
        self.boxes = 0
        """Sandboxes used so far."""

    async def run(self, jobs: Sequence[Job]) -> list[list[Run]]:
        """The runs of each job, in order. Raises `SandboxUnavailable`."""
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(job, loop.create_future()) for job in jobs]
        self._waiting.extend(waiting)
        for _ in range(min(len(jobs), self._most - len(self._busy))):
            task = asyncio.create_task(self._work(), name="sandboxes")
            self._busy.add(task)
            task.add_done_callback(self._busy.discard)
        try:
            return list(await asyncio.gather(*(one.runs for one in waiting)))
        finally:
            for one in waiting:
                one.runs.cancel()

    async def aclose(self) -> None:
        """Ends what is running."""
        for task in list(self._busy):
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)

    async def _work(self) -> None:
        """Takes batches for as long as jobs wait."""
        await asyncio.sleep(0)  # whoever asks in the same turn of the loop comes along
        while batch := self._next_batch():
            try:
                rung = self._rung if self._rung is not None else await asyncio.to_thread(backends.rung)
                await self._run_batch(batch, rung)
            except BaseException as error:
                for one in batch:
                    if not one.runs.done():
                        one.runs.set_exception(error) if isinstance(error, SandboxUnavailable) else one.runs.cancel()
                if not isinstance(error, SandboxUnavailable):
                    raise

    def _next_batch(self) -> list[_Waiting]:
        """The jobs at the head of the queue that fit into one sandbox."""
        batch: list[_Waiting] = []
        size_bytes = 0
        while self._waiting and len(batch) < MOST_JOBS:
            one = self._waiting[0]
            if one.runs.done():  # nobody waits for it any more
                self._waiting.popleft()
                continue
            size_bytes += len(one.job.program) + sum(map(len, one.job.inputs))
            if batch and (_shape(one.job) != _shape(batch[0].job) or size_bytes > MOST_BYTES):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _run_batch(self, batch: Sequence[_Waiting], rung: Rung) -> None:
        if rung is Rung.LANDLOCK:
            for one in batch:
                _give(one, await self._alone(one.job, rung))
            return
        left = list(batch)
        while left:
            finished = await self._finished(
                program_of([one.job for one in left]), _limits([one.job for one in left]), rung
            )
            runs = runs_of(finished.stdout, len(left))
            done = 0
            while done < len(left) and _is_whole(left[done].job, runs[done]):
                _give(left[done], runs[done])
                done += 1
            if done < len(left):
                _give(left[done], [*runs[done], _blamed(finished)])
                done += 1
            left = left[done:]

    async def _alone(self, job: Job, rung: Rung) -> list[Run]:
        """One sandbox for each input, where a sandbox may have one process only."""
        if job.kind not in ("stdin", "call"):
            raise SandboxUnavailable(
                f"tests of the kind {job.kind!r} need a sandbox with processes; the {rung.value} one has none: "
                "install bubblewrap (on Debian and Ubuntu: apt install bubblewrap)"
            )
        runs: list[Run] = []
        for given in job.inputs:
            one = replace(job, inputs=(given,))
            limits = replace(_limits([one]), wall_s=one.longest_s, output_bytes=job.limit)
            finished = await self._finished(program_of([one], alone=True), limits, rung)
            run = (
                _blamed(finished)
                if finished.ended is not Ended.EXITED
                else Run(EXITED, finished.exit_code or 0, b"", b"")
            )
            runs.append(replace(run, out=finished.stdout, err=finished.stderr))
            if _is_last(job, runs[-1]):
                break
        return runs

    async def _finished(self, program: Program, limits: Limits, rung: Rung) -> Finished:
        for attempt in range(RETRIES + 1):
            try:
                self.boxes += 1
                return await run_async(program, limits, rung)
            except SandboxUnavailable:
                if attempt == RETRIES:
                    raise
        raise AssertionError


def _give(one: _Waiting, runs: list[Run]) -> None:
    if not one.runs.done():
        one.runs.set_result(runs)


def _shape(job: Job) -> tuple[int, bool]:
    """Jobs of one shape can share a sandbox."""
    return job.memory_bytes, job.needs_packages


def _limits(jobs: Sequence[Job]) -> Limits:
    """Room for what each job may use, since what is too much for one is noticed inside."""
    longest_s = sum(job.longest_s for job in jobs) + SLACK_S
    records = sum(len(job.inputs) * (job.limit + 4096) for job in jobs)
    return Limits(
        wall_s=longest_s,
        cpu_s=longest_s,
        memory_bytes=jobs[0].memory_bytes,
        processes=PROCESSES,
        output_bytes=records + (1 << 16),
        file_bytes=FILE_BYTES + 2 * max(len(given) for job in jobs for given in job.inputs),
    )


def program_of(jobs: Sequence[Job], *, alone: bool = False) -> Program:
    """The driver with these jobs as its input: a header that says where everything is, then everything."""
    blobs = [blob for job in jobs for blob in (job.program, *job.inputs)]
    starts = accumulate(map(len, blobs), initial=0)
    spans = iter([(start, len(blob)) for start, blob in zip(starts, blobs, strict=False)])
    header = msgspec.json.encode({"alone": alone, "jobs": [_header(job, spans) for job in jobs]})
    packages = installed_packages() if any(job.needs_packages for job in jobs) else ()
    return Program(source(), stdin=b"".join([_HEADER.pack(len(header)), header, *blobs]), packages=packages)


def _header(job: Job, spans: Iterator[tuple[int, int]]) -> dict[str, object]:
    """What the driver must know of a job; a span is an offset after the header and a size."""
    return {
        "kind": job.kind,
        "program": next(spans),
        "inputs": [next(spans) for _ in job.inputs],
        "timeout_s": job.timeout_s,
        "extra_s": job.extra_s,
        "parts": job.parts,
        "limit": job.limit,
        "stop": job.stop,
    }


def runs_of(output: bytes, jobs: int) -> list[list[Run]]:
    """What the driver wrote, by job; a record that is not whole is left out."""
    runs: list[list[Run]] = [[] for _ in range(jobs)]
    position = 0
    while position + RECORD.size <= len(output):
        number, _, status, code, out_size, err_size = RECORD.unpack_from(output, position)
        position += RECORD.size
        if position + out_size + err_size > len(output):
            break
        out = output[position : position + out_size]
        err = output[position + out_size : position + out_size + err_size]
        position += out_size + err_size
        runs[number].append(Run(status, code, out, err))
    return runs


def _is_last(job: Job, run: Run) -> bool:
    """Whether no more inputs are tried after this run."""
    return run.status == TIMED_OUT or (run.code != 0 and job.stop)


def _is_whole(job: Job, runs: Sequence[Run]) -> bool:
    return len(runs) == len(job.inputs) or (bool(runs) and _is_last(job, runs[-1]))


def _blamed(finished: Finished) -> Run:
    """The run of a program with which the sandbox ended."""
    status = {Ended.KILLED_WALL: TIMED_OUT, Ended.KILLED_CPU: TIMED_OUT, Ended.KILLED_OUTPUT: TOO_MUCH}
    words = f"ended its sandbox: {finished.ended.value.replace('_', ' ')}"
    return Run(status.get(finished.ended, SIGNALLED), -9, b"", words.encode())
