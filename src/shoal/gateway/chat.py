"""Requests of OpenAI's `/v1/chat/completions` and `/v1/completions`, and of vLLM's `/inference/v1/generate`."""

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from shoal.gateway.answer_request import AnswerRequest, SamplingRequest
from shoal.gateway.dialects import (
    ROLES,
    ModelRequest,
    TextPart,
    continued,
    conversation,
    schema_of,
    stops_of,
    text_of,
    tool_names,
    wanted_calls,
)
from shoal.gateway.fields import Refusal, unicode
from shoal.gateway.token_tree import TokenTree
from shoal.interfaces import LogitRules
from shoal.net.chat import Call
from shoal.types import Message, Role

MOST_CHOICES = 1024
"""Choices of one request, all prompts together."""
MOST_BIASES = 1024
MOST_TOKENS = 1 << 31
"""Upper bound of token ids, exclusive: engines take 32-bit integers."""
TEMPLATE_ARGUMENTS = ("enable_thinking", "thinking", "reasoning_effort")
"""Template arguments that clients may set; they may not set the renderer's own, such as the template."""


class ChatMessage(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class NamedFunction(msgspec.Struct):
    """Name of a function."""

    name: str


class AllowedTools(msgspec.Struct):
    """Tools that the model may call, of those that the request offers."""

    mode: str
    tools: list[dict[str, object]]


class ChosenTool(msgspec.Struct):
    """Choice of one tool, or of those that the model may call."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class NamedSchema(msgspec.Struct):
    """Named JSON Schema of an answer."""

    schema: dict[str, object] | None = None


class ResponseFormat(msgspec.Struct):
    """See `response_format` in OpenAI's reference."""

    type: str
    json_schema: NamedSchema | None = None


class StreamOptions(msgspec.Struct):
    """See `stream_options` in OpenAI's reference."""

    include_usage: bool | None = False


class CompletionRequest(ModelRequest, kw_only=True):
    """Fields that chat and text completions share; a trained session refuses some (`trained` in fields.toml)."""

    stream_options: StreamOptions | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.n is not None and not 1 <= self.n <= MOST_CHOICES:
            raise Refusal("n", f"1 to {MOST_CHOICES}", self.n)
        if self.logit_bias and len(self.logit_bias) > MOST_BIASES:
            raise Refusal("logit_bias", f"at most {MOST_BIASES} tokens", len(self.logit_bias))

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return at each position; None without logprobs."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the prompt comes before the answer."""
        return False

    @property
    def rules(self) -> LogitRules:
        """Rules of the logits. Raises `Refusal`."""
        try:
            bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        except ValueError:
            raise Refusal("logit_bias", "token ids as names", list(self.logit_bias or {})[:3]) from None
        return LogitRules(self.top or 0, self.presence_penalty or 0.0, self.frequency_penalty or 0.0, bias)


class ChatRequest(CompletionRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[object] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    continue_final_message: bool | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs", "logprobs = true too", self.logprobs)

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return at each position; None without logprobs."""
        return self.top_logprobs or 0 if self.logprobs else None


class TextRequest(CompletionRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logprobs is not None and self.logprobs < 0:
            raise Refusal("logprobs", "0 or more", self.logprobs)
        if self.echo and self.stream:
            raise Refusal("echo", "false in a stream", True, "ask for a body")

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return at each position; None without logprobs."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """Whether the prompt comes before the answer."""
        return bool(self.echo)


class TokenSampling(SamplingRequest, kw_only=True):
    """Sampling parameters; those of the session take precedence."""

    max_tokens: int | None = 16
    n: Literal[1] = 1
    stop: Literal[""] | None = None


class TokensRequest(ModelRequest, kw_only=True):
    """Body of `POST /inference/v1/generate`, for agents that render prompts themselves."""

    token_ids: list[int]
    sampling_params: TokenSampling
    request_id: str = ""


def chat_ask(body: ChatRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a chat body. Raises `Refusal`."""
    choice, named, offered = _choice(body)
    arguments = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        arguments = {"reasoning_effort": body.reasoning_effort, **arguments}
    messages = (_message(f"messages[{i}]", message) for i, message in enumerate(body.messages))
    tools = offered if choice != "none" else None
    asked, wanted = body.response_format, wanted_calls("tool_choice", choice, named, tools)
    schema = asked.json_schema.schema if asked and asked.json_schema else None
    spoken = conversation(messages, tools, _template_text(arguments))
    return AnswerRequest(
        continued(spoken) if body.continue_final_message else spoken,
        body,
        stops=stops_of("stop", body.stop),
        one_call=body.parallel_tool_calls is False,
        schema="" if wanted or asked is None else schema_of(asked.type, schema),
        wanted=wanted,
        rules=body.rules,
    )


def example(model: str, *, chats: bool) -> tuple[str, str]:
    """Path and body of an example request: a chat, or a text completion for a model without a chat template."""
    if chats:
        return "/v1/chat/completions", json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    return "/v1/completions", json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 64})


def _choice(body: ChatRequest) -> tuple[str, str, Sequence[object] | None]:
    """Mode of a tool choice, the one tool that it names, and the tools that the model sees. Raises `Refusal`."""
    match body.tool_choice:
        case ChosenTool(function=NamedFunction(name=name)):
            return "required", name, body.tools
        case ChosenTool(allowed_tools=AllowedTools(mode=mode, tools=tools)):
            names = tool_names(tools)
            return mode, "", [tool for tool in body.tools or () if set(tool_names([tool])) & set(names)]
        case ChosenTool(type=kind):
            raise Refusal("tool_choice", '{"type": "function", "function": {"name": ...}}', kind)
    return body.tool_choice or "auto", "", body.tools


def each_text(body: TextRequest) -> Sequence[TextRequest]:
    """Splits a request into one per prompt. Raises `Refusal`."""
    if body.prompt is None:
        raise Refusal("prompt", "a text or token ids", None, "send the token that begins a text")
    given: list[str | int | list[int]] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and isinstance(given[0], int):
        return (body,)
    if not 1 <= len(given) * body.choices <= MOST_CHOICES:
        came = f"{len(given)} prompts with n = {body.choices}"
        raise Refusal("prompt", f"1 to {MOST_CHOICES} choices of all prompts together", came, "send fewer at a time")
    if not all(isinstance(one, str | list) for one in given):
        raise Refusal("prompt", "texts, or token ids of 0 and more, not both", f"{len(given)} entries")
    return [msgspec.structs.replace(body, prompt=one) for one in given]


def text_ask(body: TextRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a text completion of one prompt. Raises `Refusal`."""
    prompt = body.prompt
    said = unicode("prompt", prompt) if isinstance(prompt, str) else _tokens("prompt", prompt or ())
    only_scores = body.echoes and body.max_tokens == 0
    return AnswerRequest(
        sampling=msgspec.structs.replace(body, max_tokens=1) if only_scores else body,
        prompt=said,
        stops=stops_of("stop", body.stop),
        rules=body.rules,
        scores_prompt=body.echoes and body.top is not None,
        samples=not only_scores,
    )


def tokens_ask(body: TokensRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a prompt in tokens. Raises `Refusal`."""
    return AnswerRequest(sampling=body.sampling_params, prompt=_tokens("token_ids", body.token_ids))


def _tokens(where: str, prompt: Sequence[object]) -> tuple[int, ...]:
    ids = tuple(token for token in prompt if isinstance(token, int) and 0 <= token < MOST_TOKENS)
    if len(ids) != len(prompt):
        raise Refusal(where, "token ids of 0 and more, or one text", f"{len(prompt)} entries")
    return ids


def _message(where: str, message: ChatMessage) -> Message:
    roles = {**ROLES, "tool": Role.TOOL}
    if message.role not in roles:
        raise Refusal(f"{where}.role", f"one of {', '.join(roles)}", message.role)
    role, text = roles[message.role], text_of(f"{where}.content", message.content)
    calls = tuple(call.tool_call for call in message.tool_calls or ()) if role is Role.ASSISTANT else ()
    return Message(role, text, calls, tool_call_id=message.tool_call_id or "")


def _template_text(arguments: dict[str, object]) -> str:
    """Template arguments as JSON; only those that control thinking are allowed. Raises `Refusal`."""
    for name, value in arguments.items():
        if name not in TEMPLATE_ARGUMENTS or not isinstance(value, bool | str):
            raise Refusal("chat_template_kwargs", f"a flag or word for {', '.join(TEMPLATE_ARGUMENTS)}", name)
    return json.dumps(arguments, sort_keys=True) if arguments else ""
