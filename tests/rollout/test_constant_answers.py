"""A dataset that pays one answer for all questions is named before the run begins."""

import asyncio
from collections.abc import Sequence

from shoal.config import RewardConfig, TaskConfig
from shoal.reward.service import RewardService
from shoal.rollout.constant_answers import FEWEST_QUESTIONS, MOST_QUESTIONS, paid_constants
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService
from shoal.types import Receipt, Reward, Split, Task

RECEIPT = Receipt("quiz", "1", "{}", seed=0, index=0)


def drawn(name: str, count: int, drawer: ProceduralClient) -> list[Task]:
    service = ReasoningGymService(TaskConfig(name=name), 0, drawer)
    return [service.draw(Split.EVAL, index) for index in range(count)]


def test_the_datasets_that_pay_a_constant_are_named_and_others_are_not() -> None:
    pay = ["game_of_life_halting", "coin_flip", "propositional_logic"]
    others = ["chain_sum", "gcd", "basic_arithmetic", "leg_counting"]

    async def found() -> list[str]:
        async with RewardService(RewardConfig(workers=1)) as scorer:
            with ProceduralClient() as drawer:
                tasks = [drawn(name, MOST_QUESTIONS, drawer) for name in (*pay, *others)]
            each = [await paid_constants(one, scorer) for one in tasks]
        return [one.partition(":")[0] for said in each for one in said]

    assert asyncio.run(found()) == pay


class Pays:
    """Scorer that gives a constant its full reward."""

    def __init__(self, constant: str) -> None:
        self.constant = constant
        self.asked = 0

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        self.asked += 1
        return [Reward(float(answer == self.constant)) for answer in answers]


def questions(count: int, receipt: Receipt | None = RECEIPT) -> list[Task]:
    return [Task(f"quiz/{number}", "quiz", (), str(number % 4 and 7), receipt=receipt) for number in range(count)]


def test_a_common_truth_is_tried_and_the_sentence_has_answer_reward_and_number() -> None:
    (said,) = asyncio.run(paid_constants(questions(100), Pays("7")))
    assert said.startswith("quiz: the answer '7' gets a mean reward of 1.00 on 32 questions")


def test_few_questions_and_those_without_a_receipt_are_not_scored() -> None:
    scorer = Pays("")
    assert asyncio.run(paid_constants([*questions(FEWEST_QUESTIONS - 1), *questions(50, None)], scorer)) == []
    assert scorer.asked == 0
