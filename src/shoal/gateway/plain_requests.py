"""Plain requests: chat and text completions without a session, with all that only a model server can give.

Their answers are never trained on, so the logits may be changed, choices repeated and texts cut.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.errors import SessionError
from shoal.gateway.chat import CHAT, ChatRequest, TextRequest
from shoal.gateway.dialects import SAMPLING, ModelRequest, Refusal, converted, fields_of, unicode
from shoal.interfaces import LogitRules
from shoal.types import Sampling, seed_for

MOST_STOPS = 16
MOST_CHOICES = 1024
"""Choices of one request, all prompts together."""
NOT_TAKEN = {name: SAMPLING[name] for name in SAMPLING if name not in ("top_k", "min_p", "stop_token_ids")}
"""Sampling parameters of other servers that a plain request cannot have either."""
CHAT_VALUES: Mapping[str, Sequence[object]] = {
    **NOT_TAKEN,
    **{name: CHAT.served[name] for name in ("tool_choice", "parallel_tool_calls")},
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "web_search_options": (),
}
TEXT_VALUES: Mapping[str, Sequence[object]] = {**NOT_TAKEN, "suffix": ("",), "best_of": (1,)}


class ResponseFormat(msgspec.Struct):
    """Response format; see `response_format` in OpenAI's reference."""

    type: str
    json_schema: dict[str, object] | None = None

    @property
    def schema(self) -> str:
        """JSON Schema as text; empty for plain text. Raises `Refusal`."""
        match self.type:
            case "text":
                return ""
            case "json_object":
                return '{"type": "object"}'
            case "json_schema" if self.json_schema is not None and isinstance(self.json_schema.get("schema"), dict):
                return json.dumps(self.json_schema["schema"])
        raise Refusal(
            "response_format", 'type "text", "json_object", or "json_schema" with json_schema.schema', self.type
        )


class PlainRules(msgspec.Struct, kw_only=True):
    """Fields that both kinds of plain request add; `top_k`, `min_p` and `stop_token_ids` are vLLM's."""

    n: int | None = 1
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None


class PlainChatRequest(ChatRequest, kw_only=True):
    """Body of `POST /v1/chat/completions` without a session."""

    top_logprobs: int | None = None
    reasoning_effort: str | None = None


class PlainTextRequest(TextRequest, kw_only=True):
    """Body of `POST /v1/completions` without a session."""

    prompt: str | list[str | int | list[int]]  # type: ignore[assignment]
    logprobs: int | None = None
    echo: bool | None = False


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """WantedLogprobs that a request asks for."""

    wanted: bool
    top: int
    echo: bool = False
    """Whether the prompt comes before the answer."""


@dataclass(frozen=True, slots=True)
class PlainOptions:
    """Options of a plain request; its prompts are elsewhere."""

    n: int
    max_tokens: int | None
    """None for as many as the context has room for; 0 only scores the prompt."""
    sampling: Sampling
    """With the bounds of one token, until a prompt's room is known."""
    rules: LogitRules
    stops: tuple[str, ...]
    logprobs: bool
    echo: bool
    stream: bool
    usage: bool
    token_ids: bool
    """Whether the client wants the tokens themselves."""

    def seed(self, index: int) -> int | None:
        """Seed of one choice: the request's own for the first, so that it is what it would be alone."""
        seed = self.sampling.seed
        return seed if seed is None or index == 0 else seed_for("choice", seed, index)


def chat_request(data: bytes) -> tuple[PlainChatRequest, PlainOptions]:
    """Chat request of a body. Raises `SessionError` or `Refused`, naming the field."""
    fields = fields_of(data, (PlainChatRequest, PlainRules), CHAT_VALUES, strict=True)
    body = converted(fields, PlainChatRequest)
    if body.top_logprobs and not body.logprobs:
        raise Refusal("top_logprobs", "logprobs = true beside it", body.logprobs)
    if body.reasoning_effort is not None:
        body.chat_template_kwargs = {"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})}
    return body, _options(
        body, converted(fields, PlainRules), WantedLogprobs(bool(body.logprobs), body.top_logprobs or 0)
    )


def text_request(data: bytes) -> tuple[PlainTextRequest, PlainOptions]:
    """Text request of a body. Raises `SessionError` or `Refused`, naming the field."""
    fields = fields_of(data, (PlainTextRequest, PlainRules), TEXT_VALUES, strict=True)
    body = converted(fields, PlainTextRequest)
    if body.logprobs is not None and body.logprobs < 0:
        raise Refusal("logprobs", "0 or more", body.logprobs)
    if body.echo and body.stream:
        raise Refusal("echo", "false in a stream", True)
    logprobs = WantedLogprobs(body.logprobs is not None, body.logprobs or 0, bool(body.echo))
    return body, _options(body, converted(fields, PlainRules), logprobs)


def prompts_of(body: PlainTextRequest) -> list[str | tuple[int, ...]]:
    """Prompts of a text request. Raises `Refusal`."""
    given: list[str | int | list[int]] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and all(isinstance(one, int) for one in given):
        given = [[one for one in given if isinstance(one, int)]]
    if not given:
        raise Refusal("prompt", "a text, token ids, or a list of either", given)
    found: list[str | tuple[int, ...]] = []
    for one in given:
        if isinstance(one, int) or (isinstance(one, list) and not all(token >= 0 for token in one)):
            raise Refusal("prompt", "texts, or token ids of 0 and more, not both", one)
        found.append(unicode("prompt", one) if isinstance(one, str) else tuple(one))
    return found


def plain_options(body: ModelRequest) -> PlainOptions:
    """Options of a request of another API, without the rules that only completions have. Raises `SessionError`."""
    return _options(body, PlainRules(), WantedLogprobs(False, 0))


def _options(body: ModelRequest, asked: PlainRules, logprobs: WantedLogprobs) -> PlainOptions:
    n, most, lowest = asked.n or 1, body.max_tokens, 0 if logprobs.echo else 1
    if not 1 <= (asked.n if asked.n is not None else 1) <= MOST_CHOICES:
        raise Refusal("n", f"1 to {MOST_CHOICES}", asked.n)
    if most is not None and most < lowest:
        raise Refusal("max_tokens", f"at least {lowest}", most)
    try:
        bias = tuple((int(token), value) for token, value in (asked.logit_bias or {}).items())
    except ValueError:
        raise Refusal("logit_bias", "token ids as names", list(asked.logit_bias or {})[:3]) from None
    schema = asked.response_format.schema if asked.response_format else ""
    rules = LogitRules(logprobs.top, asked.presence_penalty or 0.0, asked.frequency_penalty or 0.0, bias, schema)
    options = body.stream_options
    return PlainOptions(
        n=n,
        max_tokens=most,
        sampling=_sampling(body, asked),
        rules=rules,
        stops=_stops(asked.stop),
        logprobs=logprobs.wanted,
        echo=logprobs.echo,
        stream=bool(body.stream),
        usage=bool(options and options.include_usage),
        token_ids=bool(body.return_token_ids),
    )


def _sampling(body: ModelRequest, asked: PlainRules) -> Sampling:
    """Sampling of one token. Raises `SessionError`."""
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p, top_k = 1.0 if body.top_p is None else body.top_p, max(asked.top_k or 0, 0)
    try:
        return Sampling(1, temperature, top_p, top_k, asked.min_p or 0.0, tuple(asked.stop_token_ids or ()), body.seed)
    except ValueError as error:
        raise SessionError(str(error)) from error


def _stops(asked: str | list[str] | None) -> tuple[str, ...]:
    stops = [asked] if isinstance(asked, str) else asked or []
    if len(stops) > MOST_STOPS:
        raise Refusal("stop", f"at most {MOST_STOPS} texts", len(stops))
    return tuple(unicode("stop", stop) for stop in stops if stop)
