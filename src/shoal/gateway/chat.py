"""OpenAI's `/v1/chat/completions` and `/v1/completions`: requests and answers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import msgspec

from shoal.errors import SessionError
from shoal.gateway.sessions import AnswerRequest
from shoal.gateway.token_tree import Conversation, Generation
from shoal.types import FinishReason, Json, Message, Role, ToolCall

Body: TypeAlias = dict[str, Json]
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
TEMPLATE_ARGUMENTS = ("enable_thinking", "thinking", "reasoning_effort")
"""Names of the template arguments that clients may set; the renderer's own, such as the template, are not among
them."""
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "length"}


class Refusal(SessionError):
    """Refusal of a field's value that cannot be served (HTTP 400); `field` names the field."""

    def __init__(self, field: str, expected: str, came: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {came!r}")
        self.field = field


class TextPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    """Function and arguments of a quoted call."""

    name: str
    arguments: str = "{}"


class QuotedCall(msgspec.Struct):
    """Tool call as a client quotes it."""

    id: str = ""
    function: FunctionCall | None = None


class ChatMessage(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[QuotedCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct):
    """Stream options; see OpenAI's reference."""

    include_usage: bool | None = False


class Typed(msgspec.Struct):
    """Object of which only the type matters."""

    type: str


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share. Unknown fields are ignored, unserved values refused."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False

    def refuse_unserved(self) -> None:
        """Raises `Refusal` for a value that would change sampling and cannot be honoured."""
        for field, value, allowed in (
            ("n", self.n, (None, 1)),
            ("stop", self.stop, (None, "", [])),
            ("presence_penalty", self.presence_penalty, (None, 0.0)),
            ("frequency_penalty", self.frequency_penalty, (None, 0.0)),
            ("logit_bias", self.logit_bias, (None, {})),
        ):
            if value not in allowed:
                raise Refusal(field, f"none or {allowed[-1]!r}", value)


class ChatRequest(SamplingFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[object] | None = None
    tool_choice: str | Typed | None = None
    parallel_tool_calls: bool | None = True
    response_format: Typed | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    chat_template_kwargs: dict[str, object] | None = None


class TextRequest(SamplingFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int]
    logprobs: int | None = None
    echo: bool | None = False


def chat_ask(body: ChatRequest, digest: str, *, is_retry: bool, takes_tools: bool) -> AnswerRequest:
    """Answer request of a chat body. Raises `Refusal`."""
    body.refuse_unserved()
    if body.response_format is not None and body.response_format.type != "text":
        raise Refusal("response_format", "type 'text'", body.response_format.type)
    if body.tool_choice not in (None, "auto", "none"):
        raise Refusal("tool_choice", "'auto' or 'none'", msgspec.to_builtins(body.tool_choice))
    if body.parallel_tool_calls is False:
        raise Refusal("parallel_tool_calls", "true", False)
    if body.top_logprobs:
        raise Refusal("top_logprobs", "none or 0", body.top_logprobs)
    tools = tools_text(body.tools if body.tool_choice != "none" else None, takes_tools=takes_tools)
    messages = tuple(_message(i, message) for i, message in enumerate(body.messages))
    template = _template_text(body.chat_template_kwargs or {})
    return AnswerRequest(
        Conversation(checked(messages), tools, template),
        digest,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        is_retry=is_retry,
    )


def prompt_ask(prompt_ids: tuple[int, ...], ask: AnswerRequest) -> AnswerRequest:
    """Answer request with its prompt replaced by tokens. Raises `Refusal`."""
    if any(token < 0 for token in prompt_ids):
        raise Refusal("token_ids", "numbers of 0 and more", min(prompt_ids))
    named = Conversation((Message(Role.USER, repr(prompt_ids)),), template="tokens")
    return replace(ask, conversation=named, prompt_ids=prompt_ids)


def text_ask(body: TextRequest, digest: str, prompt_ids: tuple[int, ...], *, is_retry: bool) -> AnswerRequest:
    """Answer request of a text completion whose prompt is tokens. Raises `Refusal`."""
    body.refuse_unserved()
    if body.echo:
        raise Refusal("echo", "false", True)
    ask = AnswerRequest(
        Conversation(()),
        digest,
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        is_retry=is_retry,
    )
    return prompt_ask(prompt_ids, ask)


def tools_text(tools: list[object] | None, *, takes_tools: bool) -> str:
    """Tools as JSON, with the order of their fields kept. Raises `Refusal`."""
    if not tools:
        return ""
    if not takes_tools:
        raise Refusal("tools", "none: the model's chat template shows no tools", f"{len(tools)} tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(f"tools[{i}]", '{"type": "function", "function": {"name": ...}}', tool)
    return json.dumps(tools, ensure_ascii=False)


def checked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages, if they can form a conversation. Raises `Refusal`."""
    if not messages:
        raise Refusal("messages", "at least one", [])
    for i, message in enumerate(messages):
        try:
            message.content.encode()
        except UnicodeEncodeError:
            raise Refusal(f"messages[{i}].content", "Unicode text", "lone surrogates") from None
    return messages


def chat_body(generation: Generation, prompt_ids: tuple[int, ...], request: ChatRequest, created: int) -> Body:
    """Body of the answer to a chat request."""
    message: Body = {"role": "assistant", "content": generation.message.content, "refusal": None}
    if generation.message.tool_calls:
        message["tool_calls"] = [_call_body(call) for call in generation.message.tool_calls]
        message["content"] = generation.message.content or None
    if generation.message.reasoning:
        message["reasoning_content"] = generation.message.reasoning
    choice: Body = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason(generation),
        "logprobs": logprobs_body(generation) if request.logprobs else None,
        **token_fields(generation, asked=bool(request.return_token_ids)),
    }
    if generation.ill_formed:
        choice["ill_formed"] = True
    return {
        "id": f"chatcmpl-{generation.id}",
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": usage(generation, prompt_ids),
        **({"prompt_token_ids": list(prompt_ids)} if request.return_token_ids else {}),
    }


def text_body(generation: Generation, prompt_ids: tuple[int, ...], request: TextRequest, created: int) -> Body:
    """Body of the answer to a text completion."""
    choice: Body = {
        "index": 0,
        "text": generation.message.content,
        "finish_reason": FINISH[generation.completion.finish_reason],
        "logprobs": None,
        **token_fields(generation, asked=bool(request.return_token_ids)),
    }
    return {
        "id": f"cmpl-{generation.id}",
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": usage(generation, prompt_ids),
        **({"prompt_token_ids": list(prompt_ids)} if request.return_token_ids else {}),
    }


def chat_chunks(body: Body, *, with_usage: bool) -> Iterator[Body]:
    """Chunks that stream a whole chat answer."""
    choices = body["choices"]
    assert isinstance(choices, list)
    choice = choices[0]
    assert isinstance(choice, dict)
    message = choice.pop("message")
    assert isinstance(message, dict)
    head = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls) if isinstance(call, dict)]
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    extra = {"prompt_token_ids": body["prompt_token_ids"]} if "prompt_token_ids" in body else {}
    yield {**head, "choices": [{**choice, "delta": {}}], **extra}
    if with_usage:
        yield {**head, "choices": [], "usage": body["usage"]}


def text_chunks(body: Body, *, with_usage: bool) -> Iterator[Body]:
    """Chunks that stream a whole text completion."""
    yield {name: value for name, value in body.items() if name != "usage"}
    if with_usage:
        yield {**body, "choices": []}


def wants_usage(request: SamplingFields) -> bool:
    """Whether a stream ends with token counts."""
    return bool(request.stream_options and request.stream_options.include_usage)


def finish_reason(generation: Generation) -> str:
    """Finish reason in OpenAI's words."""
    if generation.completion.finish_reason is FinishReason.STOP and generation.message.tool_calls:
        return "tool_calls"
    return FINISH[generation.completion.finish_reason]


def usage(generation: Generation, prompt_ids: tuple[int, ...]) -> Body:
    """Token counts."""
    sampled = len(generation.completion.token_ids)
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": sampled,
        "total_tokens": len(prompt_ids) + sampled,
    }


def token_fields(generation: Generation, *, asked: bool) -> Body:
    """Sampled tokens and their Versions, if the client asked for them."""
    return {"token_ids": list(generation.completion.token_ids), "weight_versions": spans(generation)} if asked else {}


def spans(generation: Generation) -> list[Json]:
    """Spans of sampled tokens by Version."""
    versions, found, start = generation.completion.versions, list[Json](), 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            found.append({"version": versions[start], "start": start, "end": end})
            start = end
    return found


def logprobs_body(generation: Generation) -> Body:
    """Logprobs with an entry per sampled token, whose id has both spellings that clients know."""
    pairs = zip(generation.completion.token_ids, generation.completion.logprobs, strict=True)
    content: list[Json] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": lp, "bytes": None, "top_logprobs": []}
        for token, lp in pairs
    ]
    return {"content": content, "refusal": None}


def _template_text(arguments: dict[str, object]) -> str:
    """Template arguments as JSON; only arguments that change nothing but the thinking are allowed."""
    for name, value in arguments.items():
        if name not in TEMPLATE_ARGUMENTS or not isinstance(value, bool | str):
            raise Refusal("chat_template_kwargs", f"a flag or word for {', '.join(TEMPLATE_ARGUMENTS)}", name)
    return json.dumps(arguments, sort_keys=True) if arguments else ""


def _message(i: int, message: ChatMessage) -> Message:
    where = f"messages[{i}]"
    if message.role not in ROLES:
        raise Refusal(f"{where}.role", f"one of {', '.join(ROLES)}", message.role)
    role = ROLES[message.role]
    calls = tuple(_call(where, call) for call in message.tool_calls or ()) if role is Role.ASSISTANT else ()
    return Message(role, text_of(f"{where}.content", message.content), calls, tool_call_id=message.tool_call_id or "")


def _call(where: str, call: QuotedCall) -> ToolCall:
    if call.function is None:
        raise Refusal(f"{where}.tool_calls", "calls of functions", call.id)
    return ToolCall(call.id, call.function.name, call.function.arguments)


def text_of(where: str, content: str | list[TextPart] | None) -> str:
    """Text of the parts, joined. Raises `Refusal` for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise Refusal(where, "parts of text", part.type)
    return "".join(part.text or "" for part in content)


def _call_body(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
