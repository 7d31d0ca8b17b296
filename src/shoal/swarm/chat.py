"""A frozen model behind an OpenAI-compatible URL serves as an `Answerer`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from shoal.errors import EngineUnavailable, RequestRefused
from shoal.model.answer import written
from shoal.net.chat import FIRST_PAUSE_S, ChatChoice, ChatRefused, completion, wire_of
from shoal.swarm.offer import GeneratorKind, OfferedRollout
from shoal.types import Message, Task

AT_ONCE = 8
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ModelAt:
    """Address of a model, with its sampling settings."""

    url: str
    """URL up to and including /v1."""
    name: str
    key: str = ""
    max_tokens: int = 256
    temperature: float | None = 1.0
    """Temperature of sampling; None leaves it to the server."""


class ChatModel:
    """Client of one model; use as an async context manager."""

    kind = GeneratorKind.FROZEN

    def __init__(self, model: ModelAt) -> None:
        self._model = model
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> "ChatModel":
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def name(self) -> str:
        """Name of the model on its server."""
        return self._model.name

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        """Samples `n` independent answers and drops empty ones. Raises `EngineUnavailable` or `RequestRefused`."""
        found = await asyncio.gather(*(self.ask(task.messages) for _ in range(n)))
        return [rollout for rollout in map(_offered, found) if rollout is not None]

    async def ask(self, messages: Sequence[Message], tries: int = 1, pause_s: float = FIRST_PAUSE_S) -> ChatChoice:
        """Samples one answer, with up to `tries` attempts. Raises `EngineUnavailable` or `RequestRefused`."""
        model = self._model
        request: dict[str, object] = {
            "model": model.name,
            "messages": [wire_of(message) for message in messages],
            "max_tokens": model.max_tokens,
        }
        if model.temperature is not None:
            request["temperature"] = model.temperature
        try:
            async with self._turn:
                return await completion(self._http, model.url, request, key=model.key, tries=tries, pause_s=pause_s)
        except ChatRefused as refusal:
            raise RequestRefused(f"model {model.url}: {refusal}") from None
        except EngineUnavailable as error:
            raise EngineUnavailable(f"model {model.url}: {error}") from None


def _offered(choice: ChatChoice) -> OfferedRollout | None:
    text = written(choice.message.message)
    if not text:
        return None
    return OfferedRollout(text, complete=choice.finish_reason == "stop")
