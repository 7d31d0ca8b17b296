"""Anthropic's `/v1/messages`: requests and answers."""

import json
from collections.abc import Iterator

import msgspec

from shoal.gateway.dialects import (
    Body,
    Dialect,
    ModelRequest,
    Refusal,
    Reply,
    TextPart,
    conversation,
    function_tool,
    text_of,
)
from shoal.gateway.sessions import AnswerRequest
from shoal.gateway.token_tree import Conversation, TokenTree
from shoal.types import Message, Role, ToolCall

BLOCKS = {"user": {"text", "tool_result"}, "assistant": {"text", "tool_use", "thinking", "redacted_thinking"}}


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
    content: str | list[Block]


class OfferedTool(msgspec.Struct):
    """Tool in Anthropic's shape."""

    name: str
    description: str = ""
    input_schema: dict[str, object] = {}


class ToolChoice(msgspec.Struct):
    """Tool choice; see `tool_choice` in Anthropic's reference."""

    type: str
    disable_parallel_tool_use: bool = False


class MessagesRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/messages` and, without `max_tokens`, of `/v1/messages/count_tokens`."""

    messages: list[TurnMessage]
    system: str | list[Block] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None


def messages_ask(body: MessagesRequest, _: TokenTree) -> AnswerRequest:
    """Answer request of a body. Raises `Refusal`."""
    if body.max_tokens is None:
        raise Refusal("max_tokens", "a number", None)
    return AnswerRequest(conversation_of(body), body)


def conversation_of(body: MessagesRequest) -> Conversation:
    """Conversation of a body. Raises `Refusal`."""
    choice = body.tool_choice or ToolChoice("auto")
    if choice.type not in ("auto", "none") or choice.disable_parallel_tool_use:
        raise Refusal("tool_choice", "type 'auto' or 'none', parallel calls allowed", msgspec.to_builtins(choice))
    offered = body.tools if choice.type != "none" else None
    tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in offered or ()]
    system = (Message(Role.SYSTEM, text_of("system", body.system)),) if body.system else ()
    turns = (one for i, message in enumerate(body.messages) for one in _messages(f"messages[{i}]", message))
    return conversation((*system, *turns), tools)


def _messages(where: str, message: TurnMessage) -> Iterator[Message]:
    """Messages of one user or assistant turn; a user's tool results precede its text."""
    blocks = [Block("text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role not in BLOCKS:
        raise Refusal(f"{where}.role", "'user' or 'assistant'", message.role)
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
        yield Message(Role.USER, text)


def messages_body(reply: Reply[MessagesRequest]) -> Body:
    """Body of the answer to a request."""
    stopped = ("tool_use" if reply.message.tool_calls else "end_turn") if reply.stopped else "max_tokens"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.request.model,
        "content": [block for block, _, _ in _content(reply.message)],
        "stop_reason": stopped,
        "stop_sequence": None,
        "usage": {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)},
    }


def _content(message: Message) -> Iterator[tuple[Body, Body, Body]]:
    """Blocks of an answer, each whole, emptied, and as the delta that carries its content."""
    if thought := message.reasoning:
        block: Body = {"type": "thinking", "thinking": thought, "signature": ""}
        yield block, {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": thought}
    if text := message.content:
        yield {"type": "text", "text": text}, {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
    for call in message.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        yield block, {**block, "input": {}}, {"type": "input_json_delta", "partial_json": call.arguments}


def message_events(reply: Reply[MessagesRequest]) -> Iterator[Body]:
    """Events that stream a whole answer."""
    body = messages_body(reply)
    yield {"type": "message_start", "message": {**body, "content": [], "stop_reason": None}}
    for i, (_, empty, delta) in enumerate(_content(reply.message)):
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    stopped: Body = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stopped, "usage": body["usage"]}
    yield {"type": "message_stop"}


MESSAGES = Dialect(MessagesRequest, messages_ask, messages_body, message_events, {"stop_sequences": ([],)}, named=True)
