"""OpenAI's `/v1/chat/completions` and `/v1/completions`, and vLLM's `/inference/v1/generate`."""

import json
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from shoal.gateway.dialects import (
    Body,
    Dialect,
    ModelRequest,
    R,
    Refusal,
    Reply,
    TextPart,
    conversation,
    text_of,
    unicode,
)
from shoal.gateway.sessions import AnswerRequest, SamplingRequest
from shoal.gateway.token_tree import TokenTree
from shoal.net.chat import Call, wire_of, wire_of_call
from shoal.types import Json, Message, Role

ROLES = {"developer": Role.SYSTEM, **{role.value: role for role in Role}}
TEMPLATE_ARGUMENTS = ("enable_thinking", "thinking", "reasoning_effort")
"""Names of the template arguments that clients may set; the renderer's own, such as the template, are not among
them."""


class ChatMessage(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class ChatRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[object] | None = None
    tool_choice: str | None = None
    logprobs: bool | None = False
    chat_template_kwargs: dict[str, object] | None = None

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens


class TextRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int]
    max_tokens: int | None = 16


class TokenSampling(SamplingRequest, kw_only=True):
    """Parameters of sampling; a session's own sampling wins."""

    max_tokens: int | None = 16
    n: Literal[1] = 1
    stop: Literal[""] | None = None
    top_k: Literal[0, -1] = 0
    min_p: float = 0.0


class TokensRequest(ModelRequest, kw_only=True):
    """Body of `POST /inference/v1/generate`, for agents that render by themselves."""

    token_ids: list[int]
    sampling_params: TokenSampling
    request_id: str = ""


def chat_ask(body: ChatRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a chat body. Raises `Refusal`."""
    messages = (_message(f"messages[{i}]", message) for i, message in enumerate(body.messages))
    tools = body.tools if body.tool_choice != "none" else None
    return AnswerRequest(conversation(messages, tools, _template_text(body.chat_template_kwargs or {})), body)


def text_ask(body: TextRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a text completion. Raises `Refusal`."""
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    said = unicode("prompt", prompt) if isinstance(prompt, str) else _tokens("prompt", prompt)
    return AnswerRequest(sampling=body, prompt=said)


def tokens_ask(body: TokensRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a prompt in tokens. Raises `Refusal`."""
    if body.sampling_params.min_p:
        raise Refusal("sampling_params.min_p", "0", body.sampling_params.min_p)
    return AnswerRequest(sampling=body.sampling_params, prompt=_tokens("token_ids", body.token_ids))


def _tokens(where: str, prompt: list[str | int] | list[int]) -> tuple[int, ...]:
    ids = tuple(token for token in prompt if isinstance(token, int) and token >= 0)
    if len(ids) != len(prompt):
        raise Refusal(where, "token ids of 0 and more, or one text", f"{len(prompt)} entries")
    return ids


def _message(where: str, message: ChatMessage) -> Message:
    if message.role not in ROLES:
        raise Refusal(f"{where}.role", f"one of {', '.join(ROLES)}", message.role)
    role, text = ROLES[message.role], text_of(f"{where}.content", message.content)
    calls = tuple(call.tool_call for call in message.tool_calls or ()) if role is Role.ASSISTANT else ()
    return Message(role, text, calls, tool_call_id=message.tool_call_id or "")


def _template_text(arguments: dict[str, object]) -> str:
    """Template arguments as JSON; only arguments that change nothing but the thinking are allowed."""
    for name, value in arguments.items():
        if name not in TEMPLATE_ARGUMENTS or not isinstance(value, bool | str):
            raise Refusal("chat_template_kwargs", f"a flag or word for {', '.join(TEMPLATE_ARGUMENTS)}", name)
    return json.dumps(arguments, sort_keys=True) if arguments else ""


def chat_body(reply: Reply[ChatRequest]) -> Body:
    """Body of the answer to a chat request."""
    message = {**wire_of(reply.message), "refusal": None}
    if reply.message.tool_calls and not reply.message.content:
        message["content"] = None
    choice: Body = {"index": 0, "message": message, **_ended(reply)}
    return {**_head("chatcmpl", "chat.completion", reply), "choices": [choice], **_tail(reply)}


def chat_chunks(reply: Reply[ChatRequest]) -> Iterator[Body]:
    """Chunks that stream a whole chat answer."""
    head, message = _head("chatcmpl", "chat.completion.chunk", reply), wire_of(reply.message)
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    deltas += [{"tool_calls": [{"index": i, **wire_of_call(call)}]} for i, call in enumerate(reply.message.tool_calls)]
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, **_ended(reply)}], **reply.prompt_fields}
    yield from _usage_chunk(head, reply)


def _ended(reply: Reply[ChatRequest]) -> Body:
    called = reply.stopped and reply.message.tool_calls
    return {
        "finish_reason": "tool_calls" if called else reply.finish_reason,
        "logprobs": _logprobs(reply) if reply.request.logprobs else None,
        **reply.token_fields,
        **({"ill_formed": True} if reply.generation.ill_formed else {}),
    }


def text_body(reply: Reply[TextRequest]) -> Body:
    """Body of the answer to a text completion."""
    finish = reply.finish_reason
    choice: Body = {"index": 0, "text": reply.message.content, "finish_reason": finish, "logprobs": None}
    head = _head("cmpl", "text_completion", reply)
    return {**head, "choices": [{**choice, **reply.token_fields}], **_tail(reply)}


def text_chunks(reply: Reply[TextRequest]) -> Iterator[Body]:
    """Chunks that stream a whole text completion."""
    body = text_body(reply)
    yield {name: value for name, value in body.items() if name != "usage"}
    yield from _usage_chunk(body, reply)


def tokens_body(reply: Reply[TokensRequest]) -> Body:
    """Body of the answer to a prompt in tokens."""
    choice: Body = {
        "index": 0,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "weight_versions": reply.spans,
        "logprobs": _logprobs(reply),
    }
    prompt: list[Json] = list(reply.prompt_ids)
    return {
        "request_id": reply.request.request_id,
        "prompt_token_ids": prompt,
        "choices": [choice],
        "usage": _usage(reply),
    }


def _head(prefix: str, kind: str, reply: Reply[R]) -> Body:
    name = f"{prefix}-{reply.id}"
    return {"id": name, "object": kind, "created": reply.created, "model": reply.request.model}


def _tail(reply: Reply[R]) -> Body:
    return {"usage": _usage(reply), **reply.prompt_fields}


def _usage_chunk(head: Body, reply: Reply[R]) -> Iterator[Body]:
    """Last chunk of a stream with token counts, if the client asked for it."""
    options = reply.request.stream_options
    if options and options.include_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def _usage(reply: Reply[R]) -> Body:
    prompt, sampled = len(reply.prompt_ids), len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(reply: Reply[R]) -> Body:
    """Logprobs with an entry per sampled token, whose id has both spellings that clients know."""
    content: list[Json] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logp, "bytes": None, "top_logprobs": []}
        for token, logp in zip(reply.token_ids, reply.generation.completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


COMPLETIONS: dict[str, Sequence[object]] = {
    "n": (1,),
    "stop": ("", []),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
}
CHAT = Dialect(
    ChatRequest,
    chat_ask,
    chat_body,
    chat_chunks,
    {
        **COMPLETIONS,
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "top_logprobs": (0,),
    },
)
TEXT = Dialect(TextRequest, text_ask, text_body, text_chunks, {**COMPLETIONS, "echo": (False,)})
TOKENS = Dialect(TokensRequest, tokens_ask, tokens_body, lambda reply: (), {"stream": (False,)})
