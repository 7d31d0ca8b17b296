"""Base class of the games: draws questions by seed, and splits them by their text and hidden part."""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import msgspec

from shoal.config import TaskConfig
from shoal.errors import TaskError
from shoal.interfaces import Chat
from shoal.tasks.holdout import check_rewrite, prompt, rewritten, split_of
from shoal.types import Message, Outcome, Role, Split, Task, seed_for

MOST_ATTEMPTS = 512

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Posed:
    """A question, and the hidden part that only the game knows."""

    text: str
    hidden: msgspec.Struct
    answer: str | None = None


class SeededGame(ABC):
    """Implements `interfaces.Playable`. The text and the hidden part of a question decide its split."""

    parameters: ClassVar[type[msgspec.Struct]]

    def __init__(self, config: TaskConfig, seed: int) -> None:
        """Raises `TaskError` naming the parameter that is wrong."""
        check_rewrite(config.name, config.rewrite)
        self._config = config
        self._seed = seed
        try:
            self._given = msgspec.convert(config.params, self.parameters)
        except msgspec.ValidationError as error:
            raise TaskError(f"tasks.{config.name}.params: {error}") from None

    @property
    def name(self) -> str:
        """Unique within a run."""
        return self._config.name

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`. Raises `TaskError` when all questions belong to the other split."""
        for attempt in range(MOST_ATTEMPTS):
            posed = self.posed(random.Random(seed_for("turns", self.name, self._seed, split, index, attempt)))
            hidden = msgspec.json.encode(posed.hidden).decode()
            if split_of(f"{posed.text}\n{hidden}", self._config.eval_share) is split:
                messages = prompt(self._config.system_prompt, self.text(posed.text))
                return Task(f"{self.name}/{split}/{self._seed}/{index}", self.name, messages, posed.answer, hidden)
        raise TaskError(f"tasks.{self.name}: none of {MOST_ATTEMPTS} questions belongs to the {split} split")

    def text(self, text: str) -> str:
        """The text after the configured rewriting, as the model sees it."""
        return rewritten(text, self._config.rewrite)

    def reply(self, text: str) -> Message:
        """A message of the game to the model."""
        return Message(Role.USER, self.text(text))

    @abstractmethod
    def posed(self, rng: random.Random) -> Posed:
        """A question that depends on the generator only."""

    @abstractmethod
    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Plays one rollout."""


def hidden_of(task: Task, kind: type[S]) -> S:
    """The hidden part of a task."""
    return msgspec.json.decode(task.info, type=kind)
