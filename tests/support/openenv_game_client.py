"""Plays the game of `openenv_game`, wherever it is served."""

import asyncio
import json
import random

import pytest

from shoal.environments.openenv import openenv_environment
from shoal.tasks.sdk import PolicyFailed
from shoal.types import Message, Role, Split


class Scripted:
    """Says the next of a list."""

    base_url = api_key = ""

    def __init__(self, *said: Message | str) -> None:
        self.said = [one if isinstance(one, Message) else Message(Role.ASSISTANT, one) for one in said]
        self.asked: list[tuple[tuple[Message, ...], str]] = []

    async def answer(self, messages, *, tools="", max_tokens=None):
        self.asked.append((tuple(messages), tools))
        return self.said.pop(0)


def played_game(url: str) -> None:
    """Two letters that are in the word, and one that is not."""
    served = openenv_environment("game", url, system="One letter at a time.")
    task = served.draw(Split.TRAIN, 0)
    assert task == served.draw(Split.TRAIN, 0)
    assert task.messages[0].role is Role.SYSTEM
    seed = json.loads(task.info)["info"]["seed"]
    assert task.messages[1].content == f"Game {seed}: guess a letter."
    word = random.Random(seed).sample("abcdefgh", 3)
    second = json.dumps({"letter": word[1]})
    model = Scripted(word[0], second, "z")
    assert asyncio.run(served.rollout(task, model)).reward == 1.0
    assert [message.content for message in model.asked[-1][0][-4:]] == [word[0], "yes", second, "yes"]
    with pytest.raises(PolicyFailed, match="refuses"):
        asyncio.run(served.rollout(task, Scripted('{"number": 4}')))
