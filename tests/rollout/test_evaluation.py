"""Held-out scores count more than full marks."""

import asyncio
import math

from shoal.interfaces import Purpose
from shoal.rollout.evaluation import MOST_CHARACTERS, evaluation, shown_questions
from shoal.types import Message, Reward, RewardStatus, Role, Rollout, RolloutStatus, Task


class Marks:
    """Implements `interfaces.Runner`: each task's answer is its reward; without one the scorer fails."""

    async def rollouts(self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
        if task.answer is None:
            reward = Reward(0.0, RewardStatus.FAILED, evidence="mine.py:2")
            return (Rollout(task.id, (), (), reward, RolloutStatus.FAILED, "scorer: failed: mine.py:2"),)
        return (Rollout(task.id, (), (), Reward(float(task.answer))),)


def test_partial_credit_shows_in_the_mean_reward_and_what_cannot_be_scored_in_a_reason() -> None:
    tasks = [Task(f"t{i}", "s", (), answer) for i, answer in enumerate(("0.5", "0.25", "1.0", "0.25", None))]
    evaluated = asyncio.run(evaluation(tasks, Marks()))
    values = evaluated.values
    assert (values["sampled"], values["sampled_reward"], values["greedy_reward"]) == (0.25, 0.5, 0.5)
    assert (values["questions"], values["unscored"], values["sampled/s"]) == (5, 2, 0.25)
    assert evaluated.failure == "scorer: failed: mine.py:2"
    nothing = asyncio.run(evaluation(tasks[-1:], Marks())).values
    assert math.isnan(nothing["sampled_reward"])


class Lottery:
    """Implements `interfaces.Runner`: of several answers to a question the last is right where its truth says so."""

    async def rollouts(self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
        wins = n if task.answer == "last" else 0
        return tuple(Rollout(f"{task.id}#{i}", (), (), Reward(float(i + 1 == wins))) for i in range(n))


def test_pass_at_k_counts_a_question_once_however_many_of_its_answers_are_right() -> None:
    tasks = [Task(f"t{i}", "s", (), answer) for i, answer in enumerate(("last", "none", "none", "last"))]
    evaluated = asyncio.run(evaluation(tasks, Lottery(), samples=4))
    assert (evaluated.values["pass_at_k"], evaluated.values["sampled"], evaluated.values["greedy"]) == (0.5, 0.125, 0.5)
    assert [len(rollouts) for _, _, rollouts in evaluated.rollouts] == [4] * 4 + [1] * 4
    assert "pass_at_k" not in asyncio.run(evaluation(tasks, Lottery())).values


class Echo:
    """Implements `interfaces.Runner`: repeats the question, louder when it is greedy."""

    async def rollouts(self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
        said = task.messages[-1].content.upper() if purpose is Purpose.GREEDY else task.messages[-1].content
        return (Rollout(task.id, (*task.messages, Message(Role.ASSISTANT, said)), (), Reward(1.0)),)


def test_a_few_sampled_answers_are_shown_of_every_task_and_always_the_same_questions() -> None:
    tasks = [
        Task(f"{service}{i}", service, (Message(Role.SYSTEM, "be brief"), Message(Role.USER, f"{service} {i}")), "yes")
        for i, service in enumerate("aabab")
    ]
    assert shown_questions(tasks) == [0, 2, 1]
    shown = asyncio.run(evaluation(tasks, Echo())).answers
    assert shown[:1] == [
        {"number": 0, "task": "a", "question": "a 0", "truth": "yes", "answer": "a 0", "reward": 1.0, "reason": ""}
    ]
    assert [one["question"] for one in shown] == ["a 0", "b 2", "a 1"]
    long = Task("l", "s", (Message(Role.USER, "x" * 3 * MOST_CHARACTERS),), None)
    (one,) = asyncio.run(evaluation([long], Echo())).answers
    assert len(str(one["question"])) == len(str(one["answer"])) == MOST_CHARACTERS
    failed = Task("f", "s", (Message(Role.USER, "?"),), None)
    (one,) = asyncio.run(evaluation([failed], Marks())).answers
    assert (one["reward"], one["answer"], one["reason"]) == (None, "", "scorer: failed: mine.py:2")
