"""Answers that hang, and answers that are code, harm no other answer."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from shoal.checker import task_spec
from shoal.config import RewardConfig, TaskConfig
from shoal.procedural import names
from shoal.reward.scorer import WorkerScorer
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService
from shoal.types import Reward, RewardStatus, Split, Task

HANG = "1e99999999"  # coin_flip reads it as a fraction: minutes inside one multiplication, deaf to signal handlers
NUMBER = Task("quiz/1", "quiz", (), "42", '{"scorer": "number"}')


@pytest.fixture(scope="module")
def drawn() -> Iterator[Callable[[str], Task]]:
    """The first training task of a dataset."""
    with ProceduralClient() as drawer:
        yield lambda name: ReasoningGymService(TaskConfig(name=name), 0, drawer).draw(Split.TRAIN, 0)


async def score(scorer: WorkerScorer, task: Task, answers: Sequence[str]) -> list[Reward]:
    """Rewards by the task's own checker."""
    return await scorer.score_by(task_spec(task), task, answers)


def values(rewards: list[Reward]) -> list[float | str]:
    """Values of scored answers, the status of others."""
    return [reward.value if reward.status is RewardStatus.SCORED else reward.status.value for reward in rewards]


def test_two_hung_answers_on_two_workers_change_none_of_a_hundred_verdicts(
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

    async def main() -> None:
        async with WorkerScorer(RewardConfig(workers=2, timeout_s=2)) as scorer:
            await work(scorer)

    asyncio.run(main())


ENDING = ("__import__('os')._exit(7)", "[__import__('os')._exit(7)]", "[[__import__('os')._exit(7)]]")
"""Nothing refuses them once they run: the worker would be gone."""


def test_no_dataset_runs_an_answer_that_would_end_the_worker(
    drawn: Callable[[str], Task],
) -> None:
    tasks = [drawn(name) for name in names()]

    async def main() -> None:
        async with WorkerScorer(RewardConfig(timeout_s=20)) as scorer:
            rewards = {task.service: await score(scorer, task, ENDING) for task in tasks}
            assert {name for name, given in rewards.items() if any(isinstance(v, str) for v in values(given))} == set()
            assert scorer.values["scorer_restarts"] == 0

    asyncio.run(main())
