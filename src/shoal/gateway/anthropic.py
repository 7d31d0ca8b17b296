"""Anthropic's `/v1/messages`: requests and answers."""

import json
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from shoal.gateway.answer_request import AnswerRequest
from shoal.gateway.conversation import Conversation
from shoal.gateway.dialects import (
    AnswerFormat,
    Body,
    Dialect,
    EventStream,
    ModelRequest,
    Reply,
    TextPart,
    continued,
    conversation,
    function_tool,
    schema_of,
    stops_of,
    text_of,
    wanted_calls,
)
from shoal.gateway.fields import Refusal, rules_of
from shoal.gateway.token_tree import TokenTree
from shoal.types import Message, Role, ToolCall

BLOCKS = {
    "system": {"text"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
}


class Block(TextPart):
    """One block of a message's content; its type decides which fields it has."""

    id: str = ""
    name: str = ""
    input: dict[str, object] = msgspec.field(default_factory=dict)
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None


class TurnMessage(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[Block] = ""


class OfferedTool(msgspec.Struct):
    """Tool in Anthropic's shape."""

    name: str
    description: str = ""
    input_schema: dict[str, object] = {}


class Thinking(msgspec.Struct):
    """See `thinking` in Anthropic's reference."""

    type: str


class OutputConfig(msgspec.Struct):
    """See `output_config` in Anthropic's reference."""

    format: AnswerFormat | None = None
    effort: str | None = None


class ToolChoice(msgspec.Struct):
    """See `tool_choice` in Anthropic's reference."""

    type: str
    name: str = ""
    disable_parallel_tool_use: bool = False


class MessagesRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/messages` and, without `max_tokens`, of `/v1/messages/count_tokens`."""

    messages: list[TurnMessage]
    system: str | list[Block] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


def messages_ask(body: MessagesRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a body. Raises `Refusal`."""
    if body.max_tokens is None:
        raise Refusal("max_tokens", "a number", None)
    choice, asked = body.tool_choice or ToolChoice("auto"), body.output_config and body.output_config.format
    word = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
    named = choice.name if choice.type == "tool" else ""
    wanted = wanted_calls("tool_choice", word, named, _tools(body))
    return AnswerRequest(
        conversation_of(body),
        body,
        stops=stops_of("stop_sequences", body.stop_sequences),
        one_call=choice.disable_parallel_tool_use,
        schema="" if wanted or not asked else schema_of(asked.type, asked.schema),
        wanted=wanted,
    )


def _tools(body: MessagesRequest) -> Sequence[object]:
    """Tools that the model may see. Raises `Refusal`."""
    offered = body.tools if body.tool_choice is None or body.tool_choice.type != "none" else None
    return [function_tool(tool.name, tool.description, tool.input_schema) for tool in offered or ()]


def _template(body: MessagesRequest) -> str:
    """Template arguments that thinking and effort ask for, as JSON."""
    arguments: dict[str, object] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        arguments["enable_thinking"] = arguments["thinking"] = body.thinking.type == "enabled"
    if body.output_config is not None and body.output_config.effort is not None:
        arguments["reasoning_effort"] = body.output_config.effort
    return json.dumps(arguments, sort_keys=True) if arguments else ""


def conversation_of(body: MessagesRequest) -> Conversation:
    """Conversation of a body. Raises `Refusal`."""
    system = (Message(Role.SYSTEM, text_of("system", body.system)),) if body.system else ()
    turns = (one for i, message in enumerate(body.messages) for one in _messages(f"messages[{i}]", message))
    return continued(conversation((*system, *turns), _tools(body), _template(body)))


def _messages(where: str, message: TurnMessage) -> Iterator[Message]:
    """Messages of one turn; a user's tool results precede its text."""
    blocks = [Block("text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if block.type not in BLOCKS[message.role]:
            raise Refusal(f"{where}.content", f"blocks of {', '.join(sorted(BLOCKS[message.role]))}", block.type)
    texts = [block for block in blocks if block.type == "text"]
    text = text_of(where, texts)
    if message.role == "assistant":
        used = [block for block in blocks if block.type == "tool_use"]
        calls = tuple(ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False)) for block in used)
        yield Message(Role.ASSISTANT, text, calls)
        return
    for block in blocks:
        if block.type == "tool_result":
            yield Message(Role.TOOL, text_of(where, block.content), tool_call_id=block.tool_use_id)
    if texts:
        yield Message(Role(message.role), text)


def messages_body(replies: Sequence[Reply[MessagesRequest]]) -> Body:
    """Body of the answer to a request."""
    (reply,) = replies
    stop = reply.stop or None
    ended = "tool_use" if reply.message.tool_calls else "stop_sequence" if stop else "end_turn"
    stopped = ended if reply.stopped else "max_tokens"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [block for block, _, _ in _content(reply.message)],
        "stop_reason": stopped,
        "stop_sequence": stop,
        "usage": {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)},
    }


def _content(message: Message) -> Iterator[tuple[Body, Body, Body]]:
    """Blocks of an answer, each with its empty form and the delta that carries its content."""
    if thought := message.reasoning:
        block: Body = {"type": "thinking", "thinking": thought, "signature": ""}
        yield block, {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": thought}
    if text := message.content:
        yield {"type": "text", "text": text}, {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
    for call in message.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        yield block, {**block, "input": {}}, {"type": "input_json_delta", "partial_json": call.arguments}


def _events(reply: Reply[MessagesRequest]) -> Iterator[Body]:
    """Events that stream an answer."""
    body = messages_body([reply])
    yield {"type": "message_start", "message": {**body, "content": [], "stop_reason": None, "stop_sequence": None}}
    for i, (_, empty, delta) in enumerate(_content(reply.message)):
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    stopped: Body = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": stopped, "usage": body["usage"]}
    yield {"type": "message_stop"}


MESSAGES = Dialect(
    MessagesRequest,
    rules_of("shared", "messages"),
    rules_of("trained"),
    messages_ask,
    messages_body,
    partial(EventStream, events=_events),
    named=True,
)
