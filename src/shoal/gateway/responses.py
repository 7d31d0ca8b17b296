"""OpenAI's `/v1/responses`: requests and answers."""

import json
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from shoal.gateway.answer_request import AnswerRequest
from shoal.gateway.dialects import (
    ROLES,
    AnswerFormat,
    Body,
    Dialect,
    EventStream,
    ModelRequest,
    Reply,
    TextPart,
    conversation,
    function_tool,
    schema_of,
    text_of,
    wanted_calls,
)
from shoal.gateway.fields import Refusal, rules_of
from shoal.gateway.token_tree import TokenTree
from shoal.types import Message, Role, ToolCall

ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p", "max_output_tokens")
"""Request fields that the response repeats."""


class Item(msgspec.Struct):
    """One item of a request's input; its type decides which fields it has."""

    type: str = "message"
    role: str = ""
    content: str | list[TextPart] | None = None
    call_id: str | None = ""
    name: str | None = ""
    arguments: str = "{}"
    output: str | list[TextPart] | None = None


class FunctionTool(msgspec.Struct):
    """Tool in the shape of this route."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, object] | None = None


class ChosenFunction(msgspec.Struct):
    """Choice of one tool; `allowed_tools` offers the model some of them."""

    type: str
    name: str = ""
    mode: str = "auto"
    tools: list[FunctionTool] | None = None


class TextFormat(msgspec.Struct):
    """See `text` in OpenAI's reference."""

    format: AnswerFormat | None = None


class Reasoning(msgspec.Struct):
    """See `reasoning` in OpenAI's reference; summaries are not served."""

    effort: str | None = None


class ResponsesRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_tokens: int | None = msgspec.field(default=None, name="max_output_tokens")
    tools: list[FunctionTool] | None = None
    tool_choice: str | ChosenFunction | None = None
    parallel_tool_calls: bool | None = True
    text: TextFormat | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = msgspec.field(default_factory=dict)


def responses_ask(body: ResponsesRequest, tree: TokenTree) -> AnswerRequest:
    """Answer request of a body, which extends the conversation of `previous_response_id`. Raises `Refusal`.

    Instructions replace the system message at the start of that conversation; without instructions it stays.
    """
    if not body.input:
        raise Refusal("input", "a text, or at least one item", body.input)
    before = _conversation(tree, body.previous_response_id) if body.previous_response_id is not None else ()
    if body.instructions is not None:
        kept = before[1:] if before and before[0].role is Role.SYSTEM else before
        before = (Message(Role.SYSTEM, body.instructions), *kept)
    said = [Message(Role.USER, body.input)] if isinstance(body.input, str) else _messages(body.input)
    asked, choice, named = body.text and body.text.format, body.tool_choice or "auto", ""
    offered: Sequence[FunctionTool] = body.tools or ()
    if isinstance(choice, ChosenFunction):
        choice, named, offered = _chosen(choice, offered)
    tools = [_offered(i, tool) for i, tool in enumerate(offered if choice != "none" else ())]
    wanted = wanted_calls("tool_choice", choice, named, tools)
    effort = body.reasoning.effort if body.reasoning else None
    return AnswerRequest(
        conversation((*before, *said), tools, json.dumps({"reasoning_effort": effort}) if effort else ""),
        body,
        one_call=body.parallel_tool_calls is False,
        schema="" if wanted or not asked else schema_of(asked.type, asked.schema),
        wanted=wanted,
    )


def _chosen(choice: ChosenFunction, offered: Sequence[FunctionTool]) -> tuple[str, str, Sequence[FunctionTool]]:
    """Mode of a choice, the one tool that it names, and the tools that it offers."""
    if choice.type == "function":
        return "required", choice.name, offered
    names = {tool.name for tool in choice.tools or ()}
    return choice.mode, "", [tool for tool in offered if tool.name in names]


def _conversation(tree: TokenTree, response_id: str) -> tuple[Message, ...]:
    """Conversation that ends in a response of this session. Raises `Refusal`."""
    name, _, number = response_id.rpartition("-")
    if name == f"resp_{tree.name}" and number.isascii() and number.isdigit() and len(number) < 20:
        try:
            return tree.conversation(int(number))
        except KeyError:
            pass
    raise Refusal("previous_response_id", "the id of a response of this session", response_id)


def _offered(i: int, tool: FunctionTool) -> object:
    if not tool.name:
        raise Refusal(f"tools[{i}].name", "the function's name", "")
    return function_tool(tool.name, tool.description, tool.parameters)


def _messages(items: Sequence[Item]) -> list[Message]:
    """Messages of input items: calls join the answer before them; reasoning is ignored, but separates answers."""
    messages: list[Message] = []
    joins = False  # whether a call belongs to the message before it
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type:
            case "message":
                if item.role not in ROLES:
                    raise Refusal(f"{where}.role", f"one of {', '.join(ROLES)}", item.role)
                messages.append(Message(ROLES[item.role], text_of(f"{where}.content", item.content)))
            case "function_call":
                call = ToolCall(item.call_id or "", item.name or "", item.arguments)
                last = messages.pop() if joins else Message(Role.ASSISTANT, "")
                messages.append(Message(Role.ASSISTANT, last.content, (*last.tool_calls, call)))
            case "function_call_output":
                output = text_of(f"{where}.output", item.output)
                messages.append(Message(Role.TOOL, output, tool_call_id=item.call_id or ""))
        joins = item.type != "reasoning" and messages[-1].role is Role.ASSISTANT
    return messages


def responses_body(replies: Sequence[Reply[ResponsesRequest]]) -> Body:
    """Body of the answer to a request."""
    (reply,) = replies
    prompt, sampled, fields = len(reply.prompt_ids), len(reply.token_ids), msgspec.to_builtins(reply.request)
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": _status(reply),
        "error": None,
        "incomplete_details": None if reply.stopped else {"reason": "max_output_tokens"},
        "model": reply.model,
        **{name: fields[name] for name in ECHOED},
        "output": [item for item, _ in _output(reply)],
        "parallel_tool_calls": fields["parallel_tool_calls"] is not False,
        "text": fields["text"] or {"format": {"type": "text"}},
        "tool_choice": fields["tool_choice"] or "auto",
        "tools": fields["tools"] or [],
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
        **reply.flags,
        **reply.prompt_fields,
        **reply.token_fields,
    }


def _status(reply: Reply[ResponsesRequest]) -> str:
    return "completed" if reply.stopped else "incomplete"


def _output(reply: Reply[ResponsesRequest]) -> Iterator[tuple[Body, Body | None]]:
    """Reasoning, text and call items, each with its text part or None; an empty answer still has a message."""
    message, name, status = reply.message, reply.id, _status(reply)
    if message.reasoning:
        part: Body = {"type": "reasoning_text", "text": message.reasoning}
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [part], "status": status}, part
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        item: Body = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        yield item, part
    for i, call in enumerate(message.tool_calls):
        said: Body = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        yield {"id": f"fc_{name}_{i}", "type": "function_call", "status": status, **said}, None


def _events(reply: Reply[ResponsesRequest]) -> Iterator[Body]:
    """Events that stream an answer, without their numbers."""
    body = responses_body([reply])
    begun: Body = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for i, (item, part) in enumerate(_output(reply)):
        where: Body = {"item_id": item["id"], "output_index": i}
        empty: Body = {"arguments": ""} if part is None else {"content": []}
        started: Body = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": i, "item": started}
        if part is None:
            kind, said = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", **where, "delta": said}
            yield {"type": f"{kind}.done", **where, "arguments": said}
        else:
            kind = f"response.{part['type']}"
            more: Body = {"logprobs": []} if item["type"] == "message" else {}
            where["content_index"] = 0
            yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
            yield {"type": f"{kind}.delta", **where, **more, "delta": part["text"]}
            yield {"type": f"{kind}.done", **where, **more, "text": part["text"]}
            yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


RESPONSES = Dialect(
    ResponsesRequest,
    {name: rule for name, rule in rules_of("shared", "responses").items() if name != "max_tokens"},
    rules_of("trained"),
    responses_ask,
    responses_body,
    partial(EventStream, events=_events, numbered=True),
    named=True,
)
