"""The tasks of `experiments.balance`: all ask for a word backward, and differ in what is worth something."""

import random

from shoal.interfaces import Model
from shoal.tasks.sdk import Question, environment
from shoal.types import Message, Outcome, Role, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word(rng: random.Random, shortest: int, longest: int) -> str:
    """Letters at random."""
    return "".join(rng.choices(LETTERS, k=rng.randint(shortest, longest)))


@environment("mastered")
class Mastered:
    """Any word will do: the model never fails, and no group has anything to teach."""

    def draw(self, rng: random.Random) -> Question:
        """Three to five letters."""
        return Question(f"reverse {word(rng, 3, 5)}")

    def score(self, asked: Task, answer: str) -> float:
        """Whether letters were said."""
        return float(answer.strip().isalpha())


@environment("impossible")
class Impossible:
    """Twelve letters, which this model never gets right."""

    def draw(self, rng: random.Random) -> Question:
        """Twelve letters."""
        asked = word(rng, 12, 12)
        return Question(f"reverse {asked}", answer=asked[::-1])

    def score(self, asked: Task, answer: str) -> float:
        """Whether all letters are right."""
        return float(answer.strip() == asked.answer)


@environment("second_chance")
class SecondChance:
    """A tool checks the answer; after a wrong one the model may answer once more, for half of the reward."""

    def draw(self, rng: random.Random) -> Question:
        """Three to five letters."""
        asked = word(rng, 3, 5)
        return Question(f"reverse {asked}", answer=asked[::-1])

    async def rollout(self, asked: Task, model: Model) -> Outcome:
        """One or two turns."""
        messages = list(asked.messages)
        for worth in (1.0, 0.5):
            said = await model.answer(messages)
            if said.content.strip() == asked.answer:
                return Outcome(reward=worth)
            messages += [said, Message(Role.USER, asked.messages[-1].content)]
        return Outcome(reward=0.0)


@environment("external")
class External:
    """One word, one answer, in another process."""

    def draw(self, rng: random.Random) -> Question:
        """Three to five letters."""
        asked = word(rng, 3, 5)
        return Question(f"reverse {asked}", answer=asked[::-1])

    async def rollout(self, asked: Task, model: Model) -> Outcome:
        """One turn."""
        said = await model.answer(list(asked.messages))
        return Outcome(reward=float(said.content.strip() == asked.answer))
