"""A program decides nothing about another one's time, and a sandbox that fails decides nothing at all."""

import asyncio
import json
import os
import resource
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import TypeVar

import pytest

from shoal.checker import Code, unit_tests
from shoal.config import RewardConfig
from shoal.errors import ChildDied
from shoal.reward.code import Job, Runs, is_repeatable, jobs_of
from shoal.reward.code_runner import CodeScorer
from shoal.reward.scorer import WorkerScorer
from shoal.reward.service import RewardService
from shoal.sandbox.program import Ended
from shoal.types import Json, Reward, RewardStatus, Task
from until import until

T = TypeVar("T")
ADD = "def add(a, b): return a + b"
CALLS: list[Json] = [{"call": "add", "args": [1, 2], "returns": 3}]
HOLDS = "import os, signal, time\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError: pass\ntime.sleep(60)"


def task(tests: list[Json]) -> Task:
    return Task("t", "t", (), None, json.dumps({"scorer": {"name": "code", "timeout_s": 0.3}, "tests": tests}))


def timed(tests: list[Json], timeout_s: float) -> Task:
    return Task("t", "t", (), None, json.dumps({"scorer": {"name": "code", "timeout_s": timeout_s}, "tests": tests}))


def with_scorer(most: int, work: Callable[[CodeScorer], Coroutine[None, None, T]]) -> T:
    async def main() -> T:
        async with aclosing(CodeScorer(most)) as scorer:
            return await work(scorer)

    return asyncio.run(main())


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """The next file, pipe or socket that this process opens is refused."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", ["call", "code"])
def test_a_sandbox_that_cannot_be_started_is_a_failure_and_no_score(kind: str) -> None:
    tests: list[Json] = CALLS if kind == "call" else [{"code": "assert add(1, 2) == 3"}]

    async def work(scorer: CodeScorer) -> list[Reward]:
        (before,) = await scorer.score_by(Code(), task(tests), [ADD])
        with no_descriptor_left():
            failed = await scorer.score_by(Code(), task(tests), [ADD, ADD])
        (after,) = await scorer.score_by(Code(), task(tests), [ADD])
        return [before, *failed, after]

    rewards = with_scorer(2, work)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 1.0]
    assert [reward.status for reward in rewards[1:3]] == [RewardStatus.FAILED] * 2
    assert "Too many open files" in rewards[1].evidence


def test_closing_fails_what_still_runs_and_cancels_nobody() -> None:
    async def main() -> list[Reward]:
        scorer = CodeScorer(1)
        scoring = asyncio.create_task(scorer.score_by(Code(), task(CALLS), [HOLDS, ADD]))
        await asyncio.sleep(0)  # it asks for its sandboxes
        await scorer.aclose()
        return await scoring

    assert [reward.status for reward in asyncio.run(main())] == [RewardStatus.FAILED] * 2


def test_a_program_that_holds_its_sandbox_keeps_no_other_one_waiting() -> None:
    async def work(scorer: CodeScorer) -> bool:
        holding = asyncio.create_task(scorer.score_by(Code(timeout_s=10.0), task(CALLS), [HOLDS]))
        rewards = await scorer.score_by(Code(timeout_s=10.0), task(CALLS), [f"{ADD}  # {n}" for n in range(8)])
        assert [reward.value for reward in rewards] == [1.0] * 8
        holding.cancel()
        await asyncio.wait([holding])
        return holding.cancelled()

    assert with_scorer(2, work)


def test_a_program_that_holds_its_sandbox_keeps_no_answer_of_its_own_group_waiting() -> None:
    def unscored() -> int:
        return sum(one.get_name() == "sandbox" for one in asyncio.all_tasks())

    async def work(scorer: CodeScorer) -> bool:
        answers = [HOLDS, *(f"{ADD}  # {n}" for n in range(4))]
        scoring = asyncio.create_task(scorer.score_by(Code(timeout_s=30.0), task(CALLS), answers))
        await until(lambda: scorer.sandboxes == len(answers) and unscored() == 1, most_s=30)  # it holds it for longer
        scoring.cancel()
        await asyncio.wait([scoring])
        return scoring.cancelled()

    assert with_scorer(2, work)


def test_programs_that_come_together_run_beside_each_other_and_not_in_asyncio_s_own_threads() -> None:
    source = "import time\nbegan = time.monotonic()\ntime.sleep(2)\nprint(began, time.monotonic())"

    async def work(scorer: CodeScorer) -> list[Runs | Exception]:
        busy, done = ThreadPoolExecutor(1), threading.Event()
        asyncio.get_running_loop().set_default_executor(busy)
        waiting = asyncio.get_running_loop().run_in_executor(None, done.wait)
        try:
            return [*await scorer.run([(Job("stdin", (), (b"",), 10.0, 1 << 28), source)] * 3)]
        finally:
            done.set()
            await waiting

    times = []
    for runs in with_scorer(3, work):
        assert isinstance(runs, Runs)
        times.append(tuple(map(float, runs.program[0].stdout.split())))
    assert max(began for began, _ in times) < min(ended for _, ended in times)


async def test_a_program_that_used_up_its_time_is_remembered_and_so_is_one_that_slept() -> None:
    async with asyncio.timeout(100), RewardService(RewardConfig(workers=1)) as service:
        # A busy machine gives little time to what spins, and a sleeper's is to be over long before its alarm.
        ends = (("while True: pass", 0.2), ("import time; time.sleep(60)", 2.0))
        for tests, head in ((CALLS, f"{ADD}\n"), ([{"stdin": "1", "stdout": "1"}], "")):
            for never_ends, timeout_s in ends:
                kept = len(service.cache)
                (reward,) = await service.score(timed(tests, timeout_s), [head + never_ends])
                assert (reward.value, reward.status, reward.is_repeatable) == (0.0, RewardStatus.SCORED, True)
                assert len(service.cache) == kept + 1


async def test_a_worker_that_cannot_be_started_for_want_of_descriptors_ends_with_a_sentence() -> None:
    scorer = WorkerScorer(RewardConfig(workers=1), boxed=False)
    with no_descriptor_left(), pytest.raises(ChildDied, match="could not be started"):
        await scorer.__aenter__()


def test_a_program_that_sleeps_in_each_test_waits_once_for_all_tests_together() -> None:
    sleeps = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ndef add(a, b): time.sleep(60)"

    async def work(scorer: CodeScorer) -> list[Runs | Exception]:
        (job,) = jobs_of(Code(timeout_s=0.5), unit_tests([{"call": "add", "args": [1, 2], "returns": 3}] * 40, "tests"))
        return [*await scorer.run([(job, sleeps)])]

    (runs,) = with_scorer(1, work)
    assert isinstance(runs, Runs)
    assert [(one.ended, is_repeatable(one)) for one in runs.program] == [(Ended.KILLED_IDLE, True)]


SILENT = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
NEVER = f"{SILENT}signal.setitimer(signal.ITIMER_REAL, 0)\ndef add(a, b): time.sleep(600)"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (NEVER, "assert add(1, 2) == 3"),
        ("def add(a, b): return 600", "import time\nassert time.sleep(add(1, 2)) == 3"),
    ],
)
def test_a_judged_program_that_never_answers_holds_its_sandboxes_for_the_total_of_its_tests(
    source: str, code: str
) -> None:
    async def work(scorer: CodeScorer) -> list[Runs | Exception]:
        (job,) = jobs_of(Code(timeout_s=0.1), unit_tests([{"code": code}] * 20, "tests"))
        return [*await scorer.run([(job, source)])]

    (runs,) = with_scorer(1, work)
    assert isinstance(runs, Runs)
    assert runs.judge is not None
    assert Ended.KILLED_IDLE in {one.ended for one in (*runs.program, runs.judge)}
    assert is_repeatable(runs.judge)


def test_a_program_waits_for_a_judge_that_works_and_a_judge_s_test_may_sleep() -> None:
    codes = ["import time; time.sleep(0.5); assert add(1, 2) == 3", "sum(range(10**7)); assert add(1, 2) == 3"]

    async def work(scorer: CodeScorer) -> list[Reward]:
        tests: list[Json] = [{"code": code} for code in codes * 4]
        return await scorer.score_by(Code(timeout_s=2.0), task(tests), [ADD])

    assert [reward.value for reward in with_scorer(1, work)] == [1.0]
