"""A frozen model behind any URL that speaks OpenAI's chat completions, as an `Answerer`."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from shoal.errors import EngineUnavailable, RequestRefused
from shoal.swarm.offer import GeneratorKind, OfferedRollout
from shoal.types import Message, Task

AT_ONCE = 8
TIMEOUT_S = 120.0
MAX_BODY_BYTES = 4 * 1024 * 1024
REFUSED_FOR_NOW = (408, 409, 425, 429)
"""Of HTTP's 4xx; the others would be the same the next time."""


@dataclass(frozen=True, slots=True)
class ModelAt:
    """Where a model is, and how it is asked."""

    url: str
    """Up to and including /v1."""
    name: str
    key: str = ""
    max_tokens: int = 256
    temperature: float | None = 1.0
    """The server's own when unset."""


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class Said(msgspec.Struct):
    """A message of the model."""

    content: str | None = None


class Choice(msgspec.Struct):
    """What a model answered."""

    message: Said
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Body(msgspec.Struct):
    choices: list[Choice]


class ChatModel:
    """Asks one model; use as an async context manager."""

    kind = GeneratorKind.FROZEN

    def __init__(self, model: ModelAt, *, logprobs: bool = True) -> None:
        """Without `logprobs` they are not asked for; some servers have none."""
        self._model = model
        self._logprobs = logprobs
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> "ChatModel":
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def name(self) -> str:
        """Of the model."""
        return self._model.name

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        """`n` independent answers, without those that say nothing. Raises `EngineUnavailable` or `RequestRefused`."""
        found = await asyncio.gather(*(self.said(task.messages) for _ in range(n)))
        return [rollout for rollout in map(_offered, found) if rollout is not None]

    async def said(self, messages: Sequence[Message]) -> Choice:
        """One answer; it is asked for once. Raises `EngineUnavailable` or `RequestRefused`."""
        model = self._model
        request: dict[str, object] = {
            "model": model.name,
            "messages": [{"role": message.role.value, "content": message.content} for message in messages],
            "max_tokens": model.max_tokens,
        }
        if model.temperature is not None:
            request["temperature"] = model.temperature
        if self._logprobs:
            request["logprobs"] = True
        headers = {"Authorization": f"Bearer {model.key}"} if model.key else {}
        url = f"{model.url.rstrip('/')}/chat/completions"
        try:
            async with self._turn, self._http.post(url, json=request, headers=headers) as reply:
                body = await _bounded(reply)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"model {url}: {error or type(error).__name__}") from error
        if 400 <= reply.status < 500 and reply.status not in REFUSED_FOR_NOW:
            raise RequestRefused(f"model {url}: HTTP {reply.status}: {body[:300].decode(errors='replace')}")
        try:
            return msgspec.json.decode(body, type=_Body).choices[0]
        except (msgspec.MsgspecError, IndexError):
            raise EngineUnavailable(f"model {url}: HTTP {reply.status}, no chat completion") from None


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise EngineUnavailable(f"model {reply.url}: expected at most {MAX_BODY_BYTES} bytes, got more")
    return bytes(body)


def _offered(choice: Choice) -> OfferedRollout | None:
    if not choice.message.content:
        return None
    tokens = choice.logprobs.content if choice.logprobs is not None else None
    total = math.fsum(token.logprob for token in tokens) if tokens else None
    usable = total is not None and math.isfinite(total) and total <= 0
    return OfferedRollout(
        choice.message.content, complete=choice.finish_reason == "stop", logprob=total if usable else None
    )
