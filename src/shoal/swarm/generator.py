"""A generator is a peer that does not train: a frozen model or a rule answers, and it signs and shares the answers.

The `Answerer` is a model behind a URL or a rule: `truth`, or a user's `module:function`. The takers score its answers.
A generator scores and takes nothing.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Protocol, TypeAlias

import aiohttp

from shoal.errors import EngineError, EngineUnavailable, RequestRefused, ShoalError, TaskError, WireError
from shoal.interfaces import Environment
from shoal.model.answer import written
from shoal.net.chat import FIRST_PAUSE_S, ChatChoice, ChatRefused, completion, only_model, wire_of
from shoal.swarm.peer import RETRY_S, Joined, Peer
from shoal.swarm.strategy.choice import own_function
from shoal.swarm.wire.offer import MAX_ROLLOUTS, GeneratorKind, Offer, OfferedRollout, model_name
from shoal.types import Message, Split, Task, seed_for

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


MOST_FAILURES = 5
"""Consecutive failures, before the first shared group, after which a generator with a group limit gives up."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratorPace:
    """Amount and rate of a generator's groups."""

    rollouts: int = 8
    """Answers to one question."""
    every_s: float = 1.0
    """Seconds between two questions, at least; takers read at most 8 messages a second of one author."""
    groups: int | None = None
    """Groups after which the generator ends; None for never."""


class Generator(Peer):
    """Peer that draws, asks and shares. One event loop; `run` ends after `pace.groups` or never."""

    def __init__(
        self, joined: Joined, services: Sequence[Environment], answerer: Answerer, pace: GeneratorPace
    ) -> None:
        super().__init__(joined)
        self._answerer, self._pace = answerer, pace
        self._services = {service.name: service for service in services}
        self._failure, self._failures = "", 0
        """Reason of the last failure, and number of consecutive failures."""

    async def run(self) -> None:
        """Shares the groups of its pace. Raises a `ShoalError`.

        A model that refuses the first question ends the run. So do failures from the start, if the pace limits groups.
        """
        async with asyncio.TaskGroup() as tasks:
            beside = tasks.create_task(self.beside(), name="generator: listening and reporting")
            try:
                await self._share_all()
            finally:
                beside.cancel()

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        common = super().status()
        return {
            **common,
            "failure": common["failure"] or self._failure,
            "generator": self._answerer.kind.value,
            "model": self._answerer.name,
        }

    async def _share_all(self) -> None:
        made = 0
        while self._pace.groups is None or made < self._pace.groups:
            began_s = time.monotonic()
            shared = self.connected and await self._share(made)
            made += shared
            rest_s = self._pace.every_s - (time.monotonic() - began_s)
            await asyncio.sleep(rest_s if shared else max(rest_s, RETRY_S))

    async def _share(self, number: int) -> bool:
        """Shares one group; returns whether it was done. A failure ends nothing once a group was shared."""
        index = seed_for("generator", self.peer_id, self._signer.session, number) % 2**31
        name = random.Random(index).choice(list(self._services))
        try:
            task = await asyncio.to_thread(self._services[name].draw, Split.TRAIN, index)
            answers = await self._answerer.answers(task, min(self._pace.rollouts, MAX_ROLLOUTS))
            if answers:
                claim, model = await self._own.claim(task), model_name(self._answerer.name)
                made = Offer(claim, tuple(answers[:MAX_ROLLOUTS]), self._answerer.kind, model, self._clock())
                await self._share_offer(made)
            else:
                self.tally.unsent += 1
        except (TaskError, WireError, ValueError, EngineError) as error:
            self.tally.unsent += 1
            self._failed(error)
            return False
        self._failure, self._failures = "", 0
        return True

    def _failed(self, error: Exception) -> None:
        """Reports a failure in log and status. Raises a `ShoalError` when further attempts are useless."""
        why = str(error) or type(error).__name__
        if why != self._failure:
            LOG.warning("no group was shared: %r", why)  # quoted: a server may have written it
        self._failure = why
        self._failures += 1
        if self.tally.shared:
            return
        if isinstance(error, RequestRefused):
            raise error
        if self._pace.groups is not None and self._failures >= MOST_FAILURES:
            raise ShoalError(f"no group could be shared, {self._failures} in a row failed; the last: {why}") from error
