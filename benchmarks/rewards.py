"""What a score costs, and whether hostile programs are contained, on this machine: `shoal bench rewards`.

sandbox_p50_ms        from a trivial program to its output, in a sandbox of its own; `sandbox_p90_ms` beside it
contained_share       hostile programs that got nothing and were judged rightly; `escaped` names the others
unit_tests_per_s      per core: programs of three tests each, all different, one sandbox at a time
math_per_s            answers with a number, scored by one worker process, all different
math_plain_per_s      the same by a call of the checker's function
overhead_us           what the worker process, the frames and the queue add to that, per answer
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

from benchmarks.hostile.arena import faults, ignoring_usr1, limits_of, outside, unjust
from benchmarks.hostile.corpus import CASES, Case
from benchmarks.hostile.judged import JUDGED
from benchmarks.hostile.judged import TESTS as TESTED
from shoal import checker
from shoal.config import RewardConfig
from shoal.reward.code_runner import CodeScorer
from shoal.reward.mathematics import mathematics
from shoal.reward.scorer import WorkerScorer
from shoal.sandbox.program import Backend, Program
from shoal.sandbox.runner import run, strongest
from shoal.types import Reward, RewardStatus, Task

Report = dict[str, object]
GROUP = 8
TRIVIAL = Program("print(6 * 7)")
TESTS = [{"call": "add", "args": [a, b], "returns": a + b} for a, b in ((1, 2), (2, 2), (-3, 5))]
AT_ONCE = 4
ROUNDS = 3
"""Rounds of each rate; the best counts, since other programs may use the machine."""


def measure(quick: bool) -> Report:
    """Measures the figures of the module's text. Raises `SandboxUnavailable`."""
    backend = strongest()
    times_ms = _sandbox_ms(backend, 10 if quick else 60)
    cases = CASES[::12] if quick else CASES
    kinds = ("stdin",) if quick else tuple(TESTED)
    unjustly = [line.partition(":")[0] for kind in kinds for line in asyncio.run(unjust(kind, backend))]
    escaped = _escaped(backend, cases) + unjustly
    hostile = len(cases) + sum(case.kind in kinds for case in JUDGED)
    groups = 2 if quick else 16
    plain_per_s = max(_plain_per_s(100 * groups) for _ in range(ROUNDS))
    math_per_s = asyncio.run(_math_per_s(10 * groups))
    return {
        "rung": backend.value,
        "sandbox_p50_ms": median(times_ms),
        "sandbox_p90_ms": quantiles(times_ms, n=10)[-1],
        "contained_share": 1 - len(escaped) / hostile,
        "escaped": escaped,
        "hostile": hostile,
        "unit_tests_per_s": asyncio.run(_unit_tests_per_s(groups)),
        "math_per_s": math_per_s,
        "math_plain_per_s": plain_per_s,
        "overhead_us": 1e6 * (1 / math_per_s - 1 / plain_per_s),
    }


def _sandbox_ms(backend: Backend, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        finished = run(TRIVIAL, backend=backend)
        times.append(1e3 * (time.perf_counter() - began_s))
        assert finished.stdout == b"42\n", finished
    return times


def _escaped(backend: Backend, cases: Sequence[Case]) -> list[str]:
    """Names of the cases that were not contained; `outside` when a target outside was harmed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        outside(Path(folder)) as world,
        ignoring_usr1() as signals,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):

        def is_contained(case: Case) -> bool:
            program = Program(world.source(case), files=dict(case.files), stdin=b"21\n")
            return not faults(case, run(program, limits_of(case), backend=backend))

        contained = list(threads.map(is_contained, cases))
        harmed = ["outside"] if world.harm() or signals else []
    return [case.name for case, is_good in zip(cases, contained, strict=True) if not is_good] + harmed


async def _unit_tests_per_s(groups: int) -> float:
    """Scores programs that differ by a comment, so that none is scored from memory."""
    scorer = CodeScorer(1)
    task = Task("bench", "bench", (), None, json.dumps({"tests": TESTS}))
    numbers = iter(range(1 << 30))

    def programs() -> list[str]:
        return [f"def add(a, b):\n    return a + b  # {next(numbers)}\n" for _ in range(GROUP)]

    async with contextlib.aclosing(scorer):
        rate = await _rate(lambda: scorer.score_by(checker.Code(), task, programs()), groups)
    return rate * len(TESTS)


async def _math_per_s(groups: int) -> float:
    task = Task("bench", "bench", (), "1234")
    numbers = iter(range(1 << 30))
    async with WorkerScorer(RewardConfig(workers=1)) as scorer:
        return await _rate(
            lambda: scorer.score_by(checker.Math(), task, [_answer(next(numbers)) for _ in range(GROUP)]), groups
        )


def _plain_per_s(count: int) -> float:
    answers = [_answer(number) for number in range(count)]
    began_s = time.perf_counter()
    for answer in answers:
        mathematics(answer, "1234")
    return count / (time.perf_counter() - began_s)


def _answer(number: int) -> str:
    return f"First 12 * 100 is 1200, then 34 more; case {number}.\n#### {1234 if number % 2 else number}"


async def _rate(scored: Callable[[], Awaitable[list[Reward]]], groups: int) -> float:
    """Answers per second in the best round of `groups` groups, one after the other."""
    await scored()
    best = 0.0
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(groups):
            rewards = await scored()
            assert all(reward.status is RewardStatus.SCORED for reward in rewards), rewards
        best = max(best, groups * GROUP / (time.perf_counter() - began_s))
    return best
