"""Tasks that tests serve from processes of their own."""

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path

from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed, Question, environment
from shoal.types import Outcome


class Sums:
    """Answered by the model, scored here; takes as long as the environment says, and fails as often."""

    seconds = 0.02
    failing = 0.0

    def draw(self, rng):
        a, b = rng.randrange(10_000), rng.randrange(10_000)
        return Question(f"{a}+{b}", answer=str(a + b))

    async def rollout(self, asked, model):
        said = await model.answer(asked.messages)
        await asyncio.sleep(self.seconds)
        if random.random() < self.failing:
            raise EnvironmentFailed("it rains")
        return said.content

    def score(self, asked, answer):
        return float(len(answer) % 2)


@environment("fast", version="1", max_running=64)
class Fast(Sums):
    seconds = 0.1


@environment("slow", version="1", max_running=512)
class Slow(Sums):
    seconds = 2.0


@environment("flaky", version="1", max_running=64)
class Flaky(Sums):
    seconds = 0.1
    failing = 0.3


@environment("words")
def words(rng):
    return Question(f"say {rng.choice('abcdefghij')}{rng.randrange(1000)}", answer="x", scorer="contains")


@environment("letters")
@dataclass
class Letters:
    """Asks for as many letters as the configuration says."""

    count: int = 1

    def draw(self, rng):
        return "".join(rng.choices("abcdefgh", k=self.count))


@environment("moods")
class Moods:
    """Does what the question says."""

    def draw(self, rng):
        return rng.choice(["policy", "environment", "raise", "hang", "reward", "nothing"]) + f" {rng.randrange(10**6)}"

    async def rollout(self, asked, model):
        mood = asked.messages[0].content.split()[0]
        await model.answer(asked.messages)
        match mood:
            case "policy":
                raise PolicyFailed("it called the same tool ten times")
            case "environment":
                raise EnvironmentFailed("the shop is closed")
            case "raise":
                raise ZeroDivisionError
            case "hang":
                await asyncio.sleep(3600)
            case "reward":
                return Outcome(reward=0.5)
        return None

    def score(self, asked, answer):
        return 0.25


@environment("mortal")
class Mortal:
    """Its process dies in the middle of a rollout, once."""

    def draw(self, rng):
        return Question(f"{rng.random()}", answer="1")

    async def rollout(self, asked, model):
        await model.answer(asked.messages)
        die_once()
        await model.answer(asked.messages)
        return 1.0


def die_once():
    flag = Path(os.environ["MORTAL_FLAG"])
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), 9)
