"""Clients of OpenAI's chat completions at a URL: of a judge, a frozen model, or a session's model.

Creating OpenAI's client costs processor time and blocks the event loop, so no rollout has a separate one.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from shoal.errors import ConfigError, EngineUnavailable, RequestRefused, TaskError
from shoal.net.client import Retry, authorization, decoded, exchange, words
from shoal.types import Json, Message, Role, ToolCall

if TYPE_CHECKING:
    from openai import AsyncOpenAI


MOST_BYTES = 4 * 1024 * 1024
"""Bytes of an answer."""
TIMEOUT_S = 3600.0
"""Seconds for one answer, queueing included; callers with less patience cancel."""
FIRST_PAUSE_S = 0.5
REFUSED_FOR_NOW = frozenset({408, 409, 425, 429})
"""HTTP 4xx statuses that are retried; the others are permanent."""


class ChatRefused(RequestRefused):
    """Refusal by the server, with the server's error code, if any."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class _Function(msgspec.Struct):
    """Name and arguments of a call."""

    name: str = ""
    arguments: str = "{}"


class Call(msgspec.Struct):
    """Tool call in OpenAI's form."""

    function: _Function
    id: str = ""

    @property
    def tool_call(self) -> ToolCall:
        """Tool call in Shoal's form."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


class ChatReply(msgspec.Struct):
    """Message of the model in OpenAI's form."""

    content: str | None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None

    @property
    def message(self) -> Message:
        """Message in Shoal's form."""
        calls = tuple(call.tool_call for call in self.tool_calls or [])
        return Message(Role.ASSISTANT, self.content or "", calls, reasoning=self.reasoning_content or "")


class ChatChoice(msgspec.Struct):
    """One choice of a completion."""

    message: ChatReply
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[ChatChoice]


class _Named(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Named]


class _ErrorBody(msgspec.Struct):
    error: dict[str, object]


def wire_of(message: Message) -> dict[str, Json]:
    """Message in the form of OpenAI's clients.

    >>> wire_of(Message(Role.USER, "Hello"))
    {'role': 'user', 'content': 'Hello'}
    """
    body: dict[str, Json] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [wire_of_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    return body


def wire_of_call(call: ToolCall) -> dict[str, Json]:
    """Tool call in the form of OpenAI's clients."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def only_model(http: aiohttp.ClientSession, url: str, key: str = "") -> str:
    """Name of the one model that a server lists; `url` is up to and including /v1.

    Raises `EngineUnavailable` for a server that does not list models, and `ConfigError` for one that has several.
    """
    listing = f"{url.rstrip('/')}/models"
    status, body = await exchange(http, "GET", listing, b"", authorization(key), timeout_s=TIMEOUT_S)
    if status != 200:
        raise EngineUnavailable(f"{listing}: HTTP {status}: {words(body)}")
    names = [one.id for one in decoded(body, _Models, listing).data]
    if len(names) != 1:
        raise ConfigError(f"model: expected the name of one of {', '.join(names) or 'no models'} at {url}, got none")
    return names[0]


async def completion(
    http: aiohttp.ClientSession,
    url: str,
    request: Mapping[str, object],
    *,
    key: str = "",
    tries: int = 1,
    pause_s: float = FIRST_PAUSE_S,
) -> ChatChoice:
    """Requests a chat completion and returns its first choice.

    `url` is up to and including /v1; each pause is twice as long as the one before it. Raises `ChatRefused` for a
    permanent refusal, and `EngineUnavailable` when no try got an answer.
    """
    retry = Retry(tries, pause_s, timeouts=True, statuses=lambda status: status >= 500 or status in REFUSED_FOR_NOW)
    status, body = await exchange(
        http,
        "POST",
        f"{url.rstrip('/')}/chat/completions",
        msgspec.json.encode(request),
        authorization(key),
        timeout_s=TIMEOUT_S,
        most_bytes=MOST_BYTES,
        retry=retry,
    )
    return _choice(status, body)


def _choice(status: int, body: bytes) -> ChatChoice:
    said = f"HTTP {status}: {body[:300].decode(errors='replace')}"
    if 400 <= status < 500 and status not in REFUSED_FOR_NOW:
        try:
            code = msgspec.json.decode(body, type=_ErrorBody).error.get("code")
        except (msgspec.MsgspecError, RecursionError):
            code = None
        raise ChatRefused(said, str(code or ""))
    if status != 200:
        raise EngineUnavailable(said)
    try:
        return msgspec.json.decode(body, type=_Body).choices[0]
    except (msgspec.MsgspecError, RecursionError, IndexError):
        raise EngineUnavailable(f"expected a chat completion, got {body[:80]!r}") from None


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI]" = WeakKeyDictionary()


def session_client(base_url: str, key: str, timeout_s: float) -> "AsyncOpenAI":
    """Client of `base_url` that shares the connections of this event loop's other clients.

    Raises `TaskError` without the package openai.
    """
    loop = asyncio.get_running_loop()
    if loop not in _shared:
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError:
            raise TaskError("expected the package openai; pip install 'shoal[agents]' brings it") from None
        _shared[loop] = AsyncOpenAI(api_key="-", base_url="http://127.0.0.1")
    return _shared[loop].with_options(base_url=base_url, api_key=key, timeout=timeout_s)


async def close_clients() -> None:
    """Closes the connections of this event loop's clients."""
    shared = _shared.pop(asyncio.get_running_loop(), None)
    if shared is not None:
        await shared.close()
