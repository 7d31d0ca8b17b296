"""OpenAI's `/v1/responses`: requests and answers."""

from collections.abc import Iterator, Sequence

import msgspec

from shoal.gateway.chat import Body, Refusal, StreamOptions, TextPart, Typed, checked, text_of, token_fields, tools_text
from shoal.gateway.sessions import AnswerRequest
from shoal.gateway.token_tree import Conversation, Generation
from shoal.types import FinishReason, Json, Message, Role, ToolCall

SPEAKERS = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


class Item(msgspec.Struct):
    """One item of a request's input; its type decides which fields it has."""

    type: str = "message"
    role: str = ""
    content: str | list[TextPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[TextPart] | None = None


class FunctionTool(msgspec.Struct):
    """Tool in the shape of this route."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, object] | None = None


class TextFormat(msgspec.Struct):
    """Text format; see `text` in OpenAI's reference."""

    format: Typed | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses`. Unknown fields are ignored, unserved values refused."""

    input: str | list[Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | Typed | None = None
    parallel_tool_calls: bool | None = True
    text: TextFormat | None = None
    truncation: str | None = None
    background: bool | None = False
    conversation: object = None
    prompt: object = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = 0
    metadata: dict[str, str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False

    def refuse_unserved(self) -> None:
        """Raises `Refusal` for a value that would change sampling or needs a service that is absent."""
        for field, value, allowed in (
            ("tool_choice", msgspec.to_builtins(self.tool_choice), (None, "none", "auto")),
            ("parallel_tool_calls", self.parallel_tool_calls, (None, True)),
            ("text.format", self.text.format.type if self.text and self.text.format else None, (None, "text")),
            ("truncation", self.truncation, (None, "disabled")),
            ("background", self.background, (None, False)),
            ("conversation", self.conversation, (None,)),
            ("prompt", self.prompt, (None,)),
            ("max_tool_calls", self.max_tool_calls, (None,)),
            ("top_logprobs", self.top_logprobs, (None, 0)),
        ):
            if value not in allowed:
                raise Refusal(field, f"none or {allowed[-1]!r}" if allowed[-1] is not None else "none", value)


def responses_ask(
    body: ResponsesRequest, before: Sequence[Message], digest: str, *, is_retry: bool, takes_tools: bool
) -> AnswerRequest:
    """Answer request of a body, after the messages `before` of the response that it names. Raises `Refusal`.

    Instructions replace the system message at the start of `before`; without instructions it stays.
    """
    body.refuse_unserved()
    if not body.input:
        raise Refusal("input", "a text, or at least one item", body.input)
    if body.instructions is not None:
        kept = before[1:] if before and before[0].role is Role.SYSTEM else before
        before = [Message(Role.SYSTEM, body.instructions), *kept]
    said = [Message(Role.USER, body.input)] if isinstance(body.input, str) else _messages(body.input)
    offered = body.tools if body.tool_choice != "none" else None
    tools = [_offered(i, tool) for i, tool in enumerate(offered or ())]
    conversation = Conversation(checked((*before, *said)), tools_text(tools, takes_tools=takes_tools))
    return AnswerRequest(conversation, digest, body.max_output_tokens, body.temperature, body.top_p, is_retry=is_retry)


def generation_id(response_id: str) -> int:
    """Generation behind a response's id. Raises `Refusal`."""
    mark, _, number = response_id.partition("_")
    if mark != "resp" or not (number.isascii() and number.isdigit() and len(number) < 20):
        raise Refusal("previous_response_id", "the id of a response of this session", response_id)
    return int(number)


def responses_body(
    generation: Generation, prompt_ids: tuple[int, ...], request: ResponsesRequest, created: int
) -> Body:
    """Body of the answer to a request."""
    whole = generation.completion.finish_reason is FinishReason.STOP
    sampled = len(generation.completion.token_ids)
    fields = token_fields(generation, asked=bool(request.return_token_ids))
    return {
        "id": f"resp_{generation.id}",
        "object": "response",
        "created_at": created,
        "status": "completed" if whole else "incomplete",
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "instructions": request.instructions,
        "metadata": dict(request.metadata or {}),
        "model": request.model,
        "output": _output(generation, "completed" if whole else "incomplete"),
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_output_tokens,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else "auto",
        "tools": msgspec.to_builtins(request.tools or []),
        "truncation": "disabled",
        "usage": {
            "input_tokens": len(prompt_ids),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt_ids) + sampled,
        },
        **({"ill_formed": True} if generation.ill_formed else {}),
        **({"prompt_token_ids": list(prompt_ids), **fields} if fields else {}),
    }


def response_events(body: Body) -> Iterator[Body]:
    """Numbered events that stream a whole answer."""
    for number, event in enumerate(_events(body)):
        yield {**event, "sequence_number": number}


def failure_event(message: str, code: str | None) -> Body:
    """Last event of a stream whose answer failed."""
    return {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}


def _events(body: Body) -> Iterator[Body]:
    output = body["output"]
    assert isinstance(output, list)
    begun: Body = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for i, item in enumerate(output):
        assert isinstance(item, dict)
        empty, said = _streamed(item, {"item_id": item["id"], "output_index": i})
        yield {"type": "response.output_item.added", "output_index": i, "item": empty}
        yield from said
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _streamed(item: Body, where: Body) -> tuple[Body, list[Body]]:
    """Item with its content emptied, and the events that carry the content."""
    if item["type"] == "function_call":
        said, kind = item["arguments"], "response.function_call_arguments"
        events: list[Body] = [
            {"type": f"{kind}.delta", **where, "delta": said},
            {"type": f"{kind}.done", **where, "arguments": said},
        ]
        return {**item, "arguments": "", "status": "in_progress"}, events
    content = item["content"]
    assert isinstance(content, list)
    part = content[0]
    assert isinstance(part, dict)
    kind = f"response.{part['type']}"
    more: Body = {"logprobs": []} if item["type"] == "message" else {}
    where = {**where, "content_index": 0}
    empty_part: Body = {**part, "text": ""}
    events = [
        {"type": "response.content_part.added", **where, "part": empty_part},
        {"type": f"{kind}.delta", **where, **more, "delta": part["text"]},
        {"type": f"{kind}.done", **where, **more, "text": part["text"]},
        {"type": "response.content_part.done", **where, "part": part},
    ]
    return {**item, "content": [], "status": "in_progress"}, events


def _output(generation: Generation, status: str) -> list[Json]:
    """Output items: reasoning, text and calls; an empty answer still has a message."""
    message, name = generation.message, generation.id
    items: list[Json] = []
    if message.reasoning:
        thought: Json = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought], "status": status})
    if message.content or not message.tool_calls:
        text: Json = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        item: Body = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [text]}
        items.append(item)
    for i, call in enumerate(message.tool_calls):
        said: Body = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"id": f"fc_{name}_{i}", "type": "function_call", "status": status, **said})
    return items


def _messages(items: Sequence[Item]) -> list[Message]:
    """Messages of input items: text and later calls join into one answer; reasoning is ignored and begins an answer."""
    messages: list[Message] = []
    joins = False  # whether a call belongs to the message before it
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type:
            case "message":
                if item.role not in SPEAKERS:
                    raise Refusal(f"{where}.role", f"one of {', '.join(SPEAKERS)}", item.role)
                messages.append(Message(SPEAKERS[item.role], text_of(f"{where}.content", item.content)))
            case "function_call":
                call = ToolCall(item.call_id, item.name, item.arguments)
                last = messages.pop() if joins else Message(Role.ASSISTANT, "")
                messages.append(Message(Role.ASSISTANT, last.content, (*last.tool_calls, call)))
            case "function_call_output":
                output = text_of(f"{where}.output", item.output)
                messages.append(Message(Role.TOOL, output, tool_call_id=item.call_id))
            case "reasoning":
                pass
            case _:
                kinds = "a message, function_call, function_call_output or reasoning"
                raise Refusal(f"{where}.type", kinds, item.type)
        joins = item.type != "reasoning" and messages[-1].role is Role.ASSISTANT
    return messages


def _offered(i: int, tool: FunctionTool) -> object:
    """Tool in the shape that templates read."""
    if tool.type != "function" or not tool.name:
        raise Refusal(f"tools[{i}]", '{"type": "function", "name": ...}', f"{tool.type} {tool.name!r}")
    function: dict[str, object] = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**function, "parameters": tool.parameters or {}}}
