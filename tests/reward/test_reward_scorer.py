"""Answers are scored in processes that may hang, crash and be attacked, one answer at a time."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from shoal.checker import task_spec
from shoal.config import RewardConfig, TaskConfig
from shoal.procedural import names
from shoal.reward.scorer import WorkerScorer
from shoal.sandbox.program import Backend
from shoal.sandbox.runner import why_not
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService
from shoal.types import Reward, RewardStatus, Split, Task
from until import alive, until

T = TypeVar("T")
HANG = "1e99999999"  # coin_flip reads it as a fraction: minutes inside one multiplication, deaf to signal handlers
WORK = Task("quiz/0", "quiz", (), "\\sqrt{2}", '{"scorer": "math"}')
NUMBER = Task("quiz/1", "quiz", (), "42", '{"scorer": "number"}')


@pytest.fixture(scope="module")
def drawn() -> Iterator[Callable[[str], Task]]:
    """The first training task of a dataset."""
    with ProceduralClient() as drawer:

        def task(name: str) -> Task:
            return ReasoningGymService(TaskConfig(name=name), 0, drawer).draw(Split.TRAIN, 0)

        yield task


def run(
    work: Callable[[WorkerScorer], Coroutine[None, None, T]],
    workers: int = 1,
    timeout_s: float = 20.0,
    grace_s: float = 250,
    *,
    boxed: bool = True,
) -> T:
    """What `work` gives with a running scorer."""
    config = RewardConfig(workers=workers, timeout_s=timeout_s)

    async def main() -> T:
        async with asyncio.timeout(grace_s), WorkerScorer(config, boxed=boxed) as scorer:
            return await work(scorer)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def scored() -> Iterator[Callable[[Task, list[str]], list[Reward]]]:
    """Rewards from one scorer that serves every test in which no worker is lost."""
    with asyncio.Runner() as runner:
        scorer = WorkerScorer(RewardConfig(timeout_s=20))
        runner.run(scorer.__aenter__())
        yield lambda task, answers: runner.run(score(scorer, task, answers))
        restarts = scorer.values["scorer_restarts"]
        runner.run(scorer.__aexit__())
        assert restarts == 0


async def score(scorer: WorkerScorer, task: Task, answers: Sequence[str]) -> list[Reward]:
    """Rewards by the task's own checker."""
    return await scorer.score_by(task_spec(task), task, answers)


def values(rewards: list[Reward]) -> list[float | str]:
    """Values of scored answers, the status of others."""
    return [reward.value if reward.status is RewardStatus.SCORED else reward.status.value for reward in rewards]


ENDING = ("__import__('os')._exit(7)", "[__import__('os')._exit(7)]", "[[__import__('os')._exit(7)]]")
"""Nothing refuses them once they run: the worker would be gone."""


def test_every_truth_scores_one_an_empty_answer_nothing_and_no_answer_ends_the_worker(
    drawn: Callable[[str], Task], scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    """That no worker was lost is asserted where the shared scorer ends."""
    tasks = [drawn(name) for name in names()]
    scores = {task.service: values(scored(task, [task.answer or "", " ", *ENDING])) for task in tasks}
    assert {task.service for task in tasks if task.answer is None} == {"boxnet", "rush_hour"}
    assert {name for name, score in scores.items() if score[:2] != [1.0, 0.0]} == {"boxnet", "rush_hour"}
    assert [name for name, score in scores.items() if any(isinstance(value, str) for value in score)] == []
    assert len(scores) > 100


def test_an_answer_on_which_the_checker_hangs_is_wrong_and_not_left_out(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> list[Reward]:
        rewards = await score(scorer, coin, [coin.answer or "", HANG, "-7", coin.answer or ""])
        assert scorer.values["scorer_restarts"] == 0
        return rewards

    rewards = run(work, timeout_s=1.0)
    assert values(rewards) == [1.0, 0.0, 0.0, 1.0]
    assert [reward.exhausted for reward in rewards] == [False, True, False, False]
    assert rewards[1].evidence == "more than 1 s of processor time"


@pytest.mark.parametrize("boxed", [True, False])
def test_an_answer_whose_checker_is_deaf_to_signals_is_wrong_once_the_kernel_ends_it(boxed: bool) -> None:
    async def work(scorer: WorkerScorer) -> list[Reward]:
        slow = asyncio.create_task(score(scorer, WORK, ["sqrt(2)" * 80] * 100))
        await until(lambda: scorer.values["scorer_run_p50_s"] > 0)
        os.kill(worker_of(scorer.pids[0]).pid, signal.SIGXCPU)  # as the kernel does
        return await slow

    rewards = run(work, boxed=boxed)
    assert values(rewards) == [0.0] * 100
    assert sum(reward.exhausted for reward in rewards) == 1


def test_wrong_timed_out_and_failed_are_three_outcomes() -> None:
    hopeless = Task("quiz/2", "quiz", (), "no number", '{"scorer": "number"}')

    async def work(scorer: WorkerScorer) -> list[list[Reward]]:
        slow = asyncio.create_task(score(scorer, WORK, ["sqrt(2)" * 80] * 100))
        await until(lambda: scorer.values["scorer_run_p50_s"] > 0)
        os.kill(worker_of(scorer.pids[0]).pid, signal.SIGSTOP)  # the machine stands still: nobody's fault
        stood = await slow
        rest = [await score(scorer, NUMBER, ["so 42.0", "43"]), await score(scorer, hopeless, ["1", "2"])]
        assert scorer.values["scorer_restarts"] == 1
        return [stood, *rest]

    stood, numbers, failed = run(work, timeout_s=0.5)
    (late,) = (reward for reward in stood if reward.status is RewardStatus.TIMED_OUT)
    assert late.evidence == "no verdict within 4 s"
    assert values(numbers) == [1.0, 0.0]
    assert values(failed) == ["failed", "failed"]
    assert "expected a number" in failed[0].evidence


def test_answers_that_hang_hold_up_their_own_worker_only(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> list[float | str]:
        hung = asyncio.create_task(score(scorer, coin, [HANG]))
        await asyncio.sleep(0.1)
        honest = [await score(scorer, coin, [coin.answer or ""] * 8) for _ in range(12)]
        assert not hung.done()
        assert values(await hung) == [0.0]
        return [value for rewards in honest for value in values(rewards)]

    assert run(work, workers=2, timeout_s=3.0) == [1.0] * 96


async def test_two_hung_answers_on_two_workers_change_none_of_a_hundred_verdicts(
    drawn: Callable[[str], Task],
) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> None:
        async def hundred() -> list[float | str]:
            groups = [score(scorer, NUMBER, ["42", "41"]) for _ in range(50)]
            return [value for rewards in await asyncio.gather(*groups) for value in values(rewards)]

        assert await hundred() == [1.0, 0.0] * 50
        hung = [asyncio.create_task(score(scorer, coin, [HANG])) for _ in range(2)]
        await asyncio.sleep(0.2)  # both workers are busy now, and every honest answer is behind a hung one
        assert await hundred() == [1.0, 0.0] * 50
        assert [values(await one) for one in hung] == [[0.0]] * 2
        assert await hundred() == [1.0, 0.0] * 50
        assert scorer.values["scorer_restarts"] == 0  # stopped, not killed

    async with WorkerScorer(RewardConfig(workers=2, timeout_s=2)) as scorer:
        await work(scorer)


def test_queueing_does_not_count_against_the_deadline(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> list[list[Reward]]:
        return await asyncio.gather(score(scorer, coin, [HANG]), *(score(scorer, NUMBER, ["42"]) for _ in range(5)))

    assert [values(rewards) for rewards in run(work, timeout_s=1.0)] == [[0.0], *[[1.0]] * 5]


def test_a_worker_killed_in_the_middle_of_a_group_is_replaced_and_every_answer_scored(
    drawn: Callable[[str], Task],
) -> None:
    integral = drawn("intermediate_integration")  # some 50 ms an answer

    async def work(scorer: WorkerScorer) -> list[Reward]:
        scoring = asyncio.create_task(score(scorer, integral, [integral.answer or ""] * 60))
        await until(lambda: scorer.values["scorer_run_p50_s"] > 0)  # the first verdict has come
        assert not scoring.done()
        os.kill(scorer.pids[0], signal.SIGKILL)
        rewards = await scoring
        assert scorer.values["scorer_restarts"] == 1
        return rewards

    assert values(run(work)) == [1.0] * 60


def test_a_worker_killed_before_it_is_ready_is_started_again(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> list[Reward]:
        (first,) = scorer.pids
        before = {child.pid for child in psutil.Process().children()}  # the worker of other tests among them
        boxed = psutil.Process(first).children(recursive=True)  # they end a moment later, and could still answer
        os.kill(first, signal.SIGKILL)
        await until(lambda: not any(alive(child.pid) for child in boxed))
        scoring = asyncio.create_task(score(scorer, coin, [coin.answer or ""]))
        await until(lambda: bool(starting(before)))
        for child in starting(before):
            child.kill()
        return await scoring

    def starting(before: set[int]) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in before]

    assert values(run(work)) == [1.0]


BUSY_S = 1.0
"""Seconds of a ready worker's processor time by which it is busy with the first answer."""


def spent_s(pid: int) -> float:
    worker = psutil.Process(pid)
    return sum(each.cpu_times().user for each in (worker, *worker.children(recursive=True)))


def busy(pid: int, since_s: float) -> bool:
    return spent_s(pid) > since_s + BUSY_S


def test_an_answer_that_kills_its_worker_twice_is_failed_and_the_next_one_scored(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> list[Reward]:
        scoring = asyncio.create_task(score(scorer, coin, [HANG, coin.answer or ""]))
        for _ in range(2):
            await until(lambda: bool(scorer.pids))
            pid = scorer.pids[0]
            await until(partial(busy, pid, spent_s(pid)))
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: pid not in scorer.pids)  # type: ignore[misc]
        return await scoring

    rewards = run(work)
    assert values(rewards) == ["failed", 1.0]
    assert "signal 9" in rewards[0].evidence


PAYLOADS = (
    "__import__('os').system('touch {path}')",
    "[__import__('os').system('touch {path}')]",
    "[[open('{path}', 'w')]]",
    "(lambda: __import__('pathlib').Path('{path}').touch())()",
    "exec(chr(111)+chr(115))",
    "().__class__.__base__.__subclasses__()",
    "sqrt(4).__class__",
)
EVALUATING = (
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
)


@pytest.mark.parametrize("name", EVALUATING)
def test_code_as_an_answer_runs_nothing(
    name: str, drawn: Callable[[str], Task], scored: Callable[[Task, list[str]], list[Reward]], tmp_path: Path
) -> None:
    task, target = drawn(name), tmp_path / "touched"
    *attacks, honest = scored(task, [*(payload.format(path=target) for payload in PAYLOADS), task.answer or ""])
    assert all(reward.value <= 0.01 and reward.status is RewardStatus.SCORED for reward in attacks)
    assert values([honest]) == [1.0]
    assert not target.exists()


def test_an_answer_that_names_the_scorers_own_variables_gains_nothing(
    drawn: Callable[[str], Task], scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    answers = ["oracle_answer", "valid_solutions", "entry['answer']"]
    for name in ("string_insertion", "spiral_matrix", "n_queens", "binary_matrix"):
        assert values(scored(drawn(name), answers)) == [0.0] * 3


def test_a_list_is_still_read_as_the_list_it_is(
    drawn: Callable[[str], Task], scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    matrix = drawn("binary_matrix")
    rows = [[int(cell) for cell in row.split()] for row in (matrix.answer or "").split("\n")]
    assert values(scored(matrix, [str(rows)])) == [0.1]


def test_a_forged_task_is_failed(
    drawn: Callable[[str], Task], scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    receipt = drawn("chain_sum").receipt
    assert receipt is not None
    forged = [
        Task("f", "f", (), "17000", receipt=receipt),
        Task("f", "f", (), None, receipt=replace(receipt, dataset="nowhere")),
        Task("f", "f", (), None, receipt=replace(receipt, config="[")),
    ]
    rewards = [scored(task, ["17000"])[0] for task in forged]
    assert values(rewards) == ["failed"] * 3
    assert "the receipt gives the truth" in rewards[0].evidence


def test_a_cancelled_group_leaves_nothing_behind_for_the_next(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")

    async def work(scorer: WorkerScorer) -> list[Reward]:
        scoring = asyncio.create_task(score(scorer, coin, [coin.answer or "", HANG]))
        await asyncio.sleep(0.3)
        scoring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await scoring
        return await score(scorer, NUMBER, ["41", "42"])

    assert values(run(work)) == [0.0, 1.0]


def worker_of(pid: int) -> psutil.Process:
    """The process that scores: the innermost, where others make its sandbox."""
    process = psutil.Process(pid)
    while children := process.children():
        (process,) = children
    return process


@pytest.mark.parametrize("boxed", [True, False])
def test_a_worker_has_no_environment_no_files_and_no_right_to_write(boxed: bool) -> None:
    async def work(scorer: WorkerScorer) -> None:
        folder = Path(f"/proc/{worker_of(scorer.pids[0]).pid}")
        assert {os.readlink(entry) for entry in (folder / "fd").iterdir() if entry.name in "012"} == {os.devnull}
        assert len(list((folder / "fd").iterdir())) == 4
        assert os.readlink(folder / "cwd") == "/"
        limits = (folder / "limits").read_text()
        assert "Max file size             0 " in limits
        assert "Max address space         2147483648 " in limits
        status = (folder / "status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        assert "CapEff:\t0000000000000000" in status

    run(work, boxed=boxed)


@pytest.mark.skipif(
    all(why_not(backend) for backend in (Backend.BUBBLEWRAP, Backend.NAMESPACES)), reason="needs namespaces"
)
def test_a_worker_sees_neither_the_disk_nor_the_network_nor_other_processes() -> None:
    async def work(scorer: WorkerScorer) -> None:
        folder = Path(f"/proc/{worker_of(scorer.pids[0]).pid}")
        for kind in ("mnt", "net", "pid", "ipc", "uts"):
            assert os.readlink(folder / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")
        root = folder / "root"
        assert not (root / "proc").exists()
        assert not (root / "etc" / "passwd").exists()
        assert not (root / Path(__file__).relative_to("/")).exists()
        assert list((root / "shoal-work").glob("*.py")) == []

    run(work)


def test_closing_in_the_middle_of_a_hang_leaves_no_process(drawn: Callable[[str], Task]) -> None:
    coin = drawn("coin_flip")
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def work(scorer: WorkerScorer) -> None:
        async with asyncio.TaskGroup() as group:
            scoring = [group.create_task(score(scorer, coin, [HANG])) for _ in range(3)]
            await asyncio.sleep(0.3)
            for task in scoring:
                task.cancel()

    run(work, workers=2)
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


CANNOT_START = """
import asyncio, resource, pathlib, sys
from shoal.config import RewardConfig
from shoal.errors import ChildDied
from shoal.reward.scorer import WorkerScorer
from shoal.sandbox.runner import strongest

async def main():
    await asyncio.to_thread(strongest)  # before the limit: it costs this process a thread
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), size + (64 << 20)))  # too little for a worker
    try:
        await WorkerScorer(RewardConfig(), pathlib.Path(sys.argv[1])).__aenter__()
    except ChildDied as error:
        print(error)

asyncio.run(main())
"""


def test_a_worker_that_cannot_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CANNOT_START, str(tmp_path / "reward.log")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert re.search(r"the reward worker process ended with code 1: .*\w", done.stdout)
