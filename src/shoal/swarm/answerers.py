"""Answerers of a generator: a frozen model behind an OpenAI-compatible URL, or a rule (a program).

A rule is `truth` or a user's `module:function`.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Protocol, TypeAlias

import aiohttp

from shoal.errors import EngineUnavailable, RequestRefused
from shoal.model.answer import written
from shoal.net.chat import FIRST_PAUSE_S, ChatChoice, ChatRefused, completion, only_model, wire_of
from shoal.swarm.strategy.choice import own_function
from shoal.swarm.wire.offer import GeneratorKind, OfferedRollout
from shoal.types import Message, Task

AT_ONCE = 8
TIMEOUT_S = 120.0

Rule: TypeAlias = Callable[[Task, int, random.Random], Sequence[str]]
"""(task, most answers, randomness) -> answers; none where the rule does not apply. Runs in a thread."""


class Answerer(Protocol):
    """Source of answers."""

    kind: GeneratorKind
    """Kind of generator that offers name."""
    name: str
    """Name for people."""

    async def answers(self, task: Task, n: int) -> Sequence[OfferedRollout]:
        """Returns up to `n` answers, possibly none. Raises an `EngineError` while the source is away."""
        ...


@dataclass
class ChatModel:
    """Client of one model; use as an async context manager."""

    url: str
    """URL up to and including /v1."""
    name: str = ""
    """Name of the model; without one it is the only model that the server lists."""
    key: str = ""
    max_tokens: int = 256
    temperature: float | None = 1.0
    """Temperature of sampling; None leaves it to the server."""
    kind: GeneratorKind = field(default=GeneratorKind.FROZEN, init=False)

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> "ChatModel":
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        try:
            self.name = self.name or await only_model(self._http, self.url, self.key)
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        """Samples `n` independent answers and drops empty ones. Raises `EngineUnavailable` or `RequestRefused`."""
        found = await asyncio.gather(*(self.ask(task.messages) for _ in range(n)))
        texts = [(written(choice.message.message), choice.finish_reason == "stop") for choice in found]
        return [OfferedRollout(text, complete=complete) for text, complete in texts if text]

    async def ask(self, messages: Sequence[Message], tries: int = 1, pause_s: float = FIRST_PAUSE_S) -> ChatChoice:
        """Samples one answer, with up to `tries` attempts. Raises `EngineUnavailable` or `RequestRefused`."""
        asked = [wire_of(message) for message in messages]
        request: dict[str, object] = {"model": self.name, "messages": asked, "max_tokens": self.max_tokens}
        if self.temperature is not None:
            request["temperature"] = self.temperature
        try:
            async with self._turn:
                return await completion(self._http, self.url, request, key=self.key, tries=tries, pause_s=pause_s)
        except ChatRefused as refusal:
            raise RequestRefused(f"model {self.url}: {refusal}") from None
        except EngineUnavailable as error:
            raise EngineUnavailable(f"model {self.url}: {error}") from None


def truth(task: Task, n: int, rng: random.Random) -> list[str]:
    """Answers with the known truth and with slips from it, half of each, so that rewards differ.

    >>> from shoal.types import Message, Role
    >>> truth(Task("1", "t", (Message(Role.USER, "?"),), "abc"), 1, random.Random(0))
    ['abc']
    """
    if not task.answer:
        return []
    right = (n + 1) // 2
    return [task.answer] * right + [slip(task.answer, rng) for _ in range(n - right)]


def slip(answer: str, rng: random.Random) -> str:
    """Replaces one character by another of its sort."""
    i = rng.randrange(len(answer))
    alphabet = digits if answer[i].isdigit() else ascii_letters[:26]
    return answer[:i] + rng.choice([one for one in alphabet if one != answer[i]]) + answer[i + 1 :]


class RuleSolver:
    """Answerer by a rule."""

    kind = GeneratorKind.RULE

    def __init__(self, name: str, seed: int) -> None:
        """Raises `ConfigError` for a name that is no rule."""
        self.name = name
        self._rule: Rule = truth if name == "truth" else own_function("rule", name, ["truth"])
        self._rng = random.Random(seed)

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        """Returns up to `n` answers of the rule. Raises the rule's exceptions."""
        texts = await asyncio.to_thread(self._rule, task, n, self._rng)
        return [OfferedRollout(text) for text in texts[:n]]
