"""A frozen model behind any URL that speaks OpenAI's chat completions, as an `Answerer`."""

import asyncio
import math
from dataclasses import dataclass

import aiohttp
import msgspec

from shoal.errors import EngineUnavailable, RequestRefused
from shoal.swarm.offer import GeneratorKind, OfferedRollout
from shoal.types import Task

AT_ONCE = 8
TIMEOUT_S = 120.0
MAX_BODY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelAt:
    """Where a model is, and how it is asked."""

    url: str
    """Up to and including /v1."""
    name: str
    key: str = ""
    max_tokens: int = 256
    temperature: float = 1.0


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]


class ChatModel:
    """Asks one model; use as an async context manager."""

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
        """Of the model."""
        return self._model.name

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        """`n` independent answers, without those that say nothing. Raises `EngineUnavailable` or `RequestRefused`."""
        found = await asyncio.gather(*(self._answer(task) for _ in range(n)))
        return [rollout for rollout in found if rollout is not None]

    async def _answer(self, task: Task) -> OfferedRollout | None:
        model = self._model
        request = {
            "model": model.name,
            "messages": [{"role": message.role.value, "content": message.content} for message in task.messages],
            "max_tokens": model.max_tokens,
            "temperature": model.temperature,
            "logprobs": True,
        }
        headers = {"Authorization": f"Bearer {model.key}"} if model.key else {}
        url = f"{model.url.rstrip('/')}/chat/completions"
        try:
            async with self._turn, self._http.post(url, json=request, headers=headers) as reply:
                body = await _bounded(reply)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"model {url}: {error or type(error).__name__}") from error
        if reply.status in (400, 401, 403, 404, 422):
            raise RequestRefused(f"model {url}: HTTP {reply.status}: {body[:300].decode(errors='replace')}")
        try:
            choice = msgspec.json.decode(body, type=_Body).choices[0]
        except (msgspec.MsgspecError, IndexError):
            raise EngineUnavailable(f"model {url}: HTTP {reply.status}, no chat completion") from None
        return _offered(choice)


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise EngineUnavailable(f"model {reply.url}: expected at most {MAX_BODY_BYTES} bytes, got more")
    return bytes(body)


def _offered(choice: _Choice) -> OfferedRollout | None:
    if not choice.message.content:
        return None
    tokens = choice.logprobs.content if choice.logprobs is not None else None
    total = math.fsum(token.logprob for token in tokens) if tokens else None
    usable = total is not None and math.isfinite(total) and total <= 0
    return OfferedRollout(
        choice.message.content, complete=choice.finish_reason == "stop", logprob=total if usable else None
    )
