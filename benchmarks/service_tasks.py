"""Echo tasks run in processes of their own: one question to the model, some waiting, a coin for a reward."""

import asyncio
import random

from benchmarks.work import coin
from shoal.interfaces import Model
from shoal.tasks.sdk import EnvironmentFailed, Question, environment
from shoal.types import Task


class Echo:
    """Task that takes some seconds and fails now and then."""

    seconds = (0.05, 0.15)
    failing = 0.0

    def draw(self, rng: random.Random) -> Question:
        """Draws a sum."""
        return Question(f"what is {rng.randrange(10**9)} + {rng.randrange(10**9)}?")

    async def rollout(self, asked: Task, model: Model) -> str:
        """Asks the model, then waits as for a tool."""
        said = await model.answer(asked.messages)
        await asyncio.sleep(random.uniform(*self.seconds))
        if random.random() < self.failing:
            raise EnvironmentFailed("the tool broke down")
        return said.content

    def score(self, asked: Task, answer: str) -> float:
        """Scores by a coin."""
        return coin(answer)


@environment("fast", max_running=64)
class Fast(Echo):
    """Task of a tenth of a second."""


@environment("slow", max_running=512)
class Slow(Echo):
    """Task that takes twenty times as long."""

    seconds = (1.0, 3.0)


@environment("flaky", max_running=64)
class Flaky(Echo):
    """Task as fast as `Fast`, of which three rollouts of ten fail."""

    failing = 0.3


@environment("patient", max_running=4096)
class Patient(Echo):
    """Task so slow that thousands run at once."""

    seconds = (18.0, 28.0)
