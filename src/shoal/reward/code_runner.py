"""Scores programs by unit tests: each runs in a sandbox by itself, tests that are programs in a further sandbox."""

import asyncio
import marshal
import socket
from collections.abc import Sequence
from dataclasses import replace

from shoal import checker
from shoal.checker import Spec
from shoal.errors import SandboxUnavailable, TaskError
from shoal.reward import code, in_sandbox
from shoal.reward.code import PYTEST_MEMORY_BYTES, WALL_START_S, Job, Runs, wall_s, why_not
from shoal.sandbox.command import installed_packages
from shoal.sandbox.program import Backend, Finished, Program, ProgramLimits
from shoal.sandbox.runner import in_thread, run_async, strongest
from shoal.sandbox.supervisor import Watch
from shoal.types import Reward, RewardStatus, Task

RETRIES = 2
"""Number of further attempts to set up a sandbox."""
RETRY_DELAY_S = 0.1
"""Seconds before the first further attempt; each next wait is twice as long."""
START_S = 0.5
"""Seconds of processor time in which Python starts."""
END_S = 2.0
"""Seconds in which a program may end by itself after its tests have ended."""
PROCESSES = 64
FILE_BYTES = 32 << 20


class CodeScorer:
    """Scores programs by unit tests; runs at most `most` programs at once, in order of arrival.

    Invariant: nothing that a program can reach is within reach of another program, or decides about another program.
    """

    def __init__(self, most: int, backend: Backend | None = None) -> None:
        """Uses the named sandbox backend, or else the strongest of this machine."""
        self._places = asyncio.Semaphore(most)
        self._backend = backend
        self._running: set[asyncio.Task[Runs]] = set()
        self.sandboxes = 0
        """Number of sandboxes used so far."""

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. A program that hangs, crashes or breaks a limit has failed its tests."""
        assert isinstance(spec, checker.Code)
        try:
            jobs = code.jobs_of(spec, code.tests_in(task.info))
        except TaskError as error:
            return [failed(error)] * len(answers)
        programs = [spec.template.replace("{answer}", code.code_of(answer)) for answer in answers]
        runs = iter(await self.run([(job, program) for program in programs for job in jobs]))
        return [self._reward(spec, [(job, next(runs)) for job in jobs]) for _ in programs]

    def _reward(self, spec: checker.Code, outcomes: Sequence[tuple[Job, Runs | SandboxUnavailable]]) -> Reward:
        """The reward of one program; a failure if a sandbox failed or the tests cannot be judged."""
        verdicts: list[code.CaseVerdict] = []
        for job, outcome in outcomes:
            if isinstance(outcome, SandboxUnavailable):
                return failed(outcome)
            try:
                verdicts += code.verdicts(job, outcome, spec.tolerance)
            except TaskError as error:
                return failed(error)
        return code.reward(verdicts, partial=spec.partial)

    async def run(self, jobs: Sequence[tuple[Job, str]]) -> list[Runs | SandboxUnavailable]:
        """The result of each job with its program, in order, or the error of a sandbox that could not be set up."""
        tasks = [asyncio.create_task(self._run_with_retries(*job), name="sandbox") for job in jobs]
        for task in tasks:
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        outcomes: list[Runs | SandboxUnavailable] = []
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, asyncio.CancelledError):
                outcomes.append(SandboxUnavailable("the sandboxes were closed"))
            elif isinstance(outcome, Runs | SandboxUnavailable):
                outcomes.append(outcome)
            else:
                raise outcome
        return outcomes

    async def aclose(self) -> None:
        """Ends all running programs."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run_with_retries(self, job: Job, text: str) -> Runs:
        async with self._places:
            for attempt in range(RETRIES + 1):
                try:
                    return await (self._run_judged if job.kind == "judge" else self._run_program)(job, text)
                except SandboxUnavailable as error:
                    why = error
                except OSError as error:  # no descriptor for the socket
                    why = SandboxUnavailable(f"no sandbox could be started: {error}")
                if attempt < RETRIES:
                    await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
            raise why

    async def _run_program(self, job: Job, text: str) -> Runs:
        """Runs a job in one sandbox, or in one per input of a script where a sandbox may have only one process."""
        if self._backend is None:
            self._backend = await in_thread(strongest)
        if job.kind == "call" or (self._backend is not Backend.LANDLOCK and len(job.given) > 1):
            return Runs((await self._run(program_of(job, text), limits_of(job)),))
        runs: list[Finished] = []
        for given in job.given:
            one = replace(job, given=(given,), count=1)
            runs.append(await self._run(program_of(one, text), limits_of(one)))
            if why_not(runs[-1]):
                break
        return Runs(tuple(runs), apart=True)

    async def _run_judged(self, job: Job, text: str) -> Runs:
        """Runs the program and its tests in a sandbox each, with a socket between them."""
        (tests,) = job.given
        memory_bytes = max(job.memory_bytes, PYTEST_MEMORY_BYTES) if job.needs_pytest else job.memory_bytes
        packages = installed_packages() if job.needs_pytest else ()
        judge = in_sandbox.program("judge", {"tests": tests}, packages=packages)
        pair = list[Watch]()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = asyncio.create_task(self._run(program_of(job, text), limits_of(job), theirs, pair))
            try:
                verdict = await self._run(judge, replace(limits_of(job), memory_bytes=memory_bytes), ours, pair)
                await asyncio.wait([program], timeout=END_S)  # the socket is closed, so an honest program ends
            finally:
                program.cancel()
                (outcome,) = await asyncio.gather(program, return_exceptions=True)
        if isinstance(outcome, asyncio.CancelledError):  # the program kept running after its tests ended
            return Runs((), verdict)
        return Runs((program.result(),), verdict)

    async def _run(
        self,
        program: Program,
        limits: ProgramLimits,
        channel: socket.socket | None = None,
        pair: list[Watch] | None = None,
    ) -> Finished:
        self.sandboxes += 1
        return await run_async(program, limits, self._backend, channel, pair)


def program_of(job: Job, text: str) -> Program:
    """The sandbox's program, which runs the text as a script, or calls its functions."""
    given = b"" if job.kind == "judge" else job.given[0]
    if job.kind == "stdin":
        given = marshal.dumps((job.cpu_s, wall_s(job.cpu_s), job.limit)) + marshal.dumps(job.given)
    return in_sandbox.program("solution", {"solution.py": text.encode(errors="replace")}, stdin=given)


def limits_of(job: Job) -> ProgramLimits:
    """Limits of a job: processor time decides, and wall time ends sleepers."""
    written = len(job.given) * 6 * job.limit if len(job.given) > 1 else job.limit  # as JSON a byte may need six
    return ProgramLimits(
        wall_s=wall_s(job.total_s),
        cpu_s=job.total_s + START_S,
        idle_s=WALL_START_S + (job.total_s if job.kind == "judge" else job.cpu_s),  # tests of a judge may sleep
        memory_bytes=job.memory_bytes,
        processes=PROCESSES,
        output_bytes=written,
        file_bytes=FILE_BYTES + max(map(len, job.given)),
    )


def failed(error: Exception) -> Reward:
    """Reward of an answer that could not be scored."""
    return Reward(0.0, RewardStatus.FAILED, evidence=str(error))
