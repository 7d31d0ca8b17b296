"""Anthropic's `/v1/messages`: requests and answers."""

import json
from collections.abc import Iterator

import msgspec

from shoal.gateway.chat import Body, Refusal, checked, tools_text
from shoal.gateway.sessions import AnswerRequest
from shoal.gateway.token_tree import Conversation, Generation
from shoal.types import FinishReason, Json, Message, Role, ToolCall


class Block(msgspec.Struct):
    """One block of a message's content; its type decides which fields it has."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, object] = {}
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


class AnthropicToolChoice(msgspec.Struct):
    """Tool choice; see `tool_choice` in Anthropic's reference."""

    type: str
    disable_parallel_tool_use: bool = False


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages` and, without `max_tokens`, of `/v1/messages/count_tokens`."""

    messages: list[TurnMessage]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False


def messages_ask(body: MessagesRequest, digest: str, *, is_retry: bool, takes_tools: bool) -> AnswerRequest:
    """Answer request of a body. Raises `Refusal`."""
    if body.stop_sequences:
        raise Refusal("stop_sequences", "none", body.stop_sequences)
    choice = body.tool_choice
    if choice is not None and (choice.type not in ("auto", "none") or choice.disable_parallel_tool_use):
        raise Refusal("tool_choice", "type 'auto' or 'none', parallel calls allowed", msgspec.to_builtins(choice))
    offered = body.tools if choice is None or choice.type != "none" else None
    tools: list[object] = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in offered or ()
    ]
    system = (Message(Role.SYSTEM, _text("system", body.system)),) if body.system else ()
    turns = (one for i, message in enumerate(body.messages) for one in _messages(f"messages[{i}]", message))
    conversation = Conversation(checked((*system, *turns)), tools_text(tools, takes_tools=takes_tools))
    return AnswerRequest(conversation, digest, body.max_tokens, body.temperature, body.top_p, is_retry=is_retry)


def messages_body(generation: Generation, prompt_ids: tuple[int, ...], model: str) -> Body:
    """Body of the answer to a request."""
    message, content = generation.message, list[Json]()
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        content.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    stopped = generation.completion.finish_reason is FinishReason.STOP
    return {
        "id": f"msg_{generation.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": ("tool_use" if message.tool_calls else "end_turn") if stopped else "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": len(prompt_ids), "output_tokens": len(generation.completion.token_ids)},
    }


def message_events(body: Body) -> Iterator[Body]:
    """Events that stream a whole answer."""
    blocks = body["content"]
    assert isinstance(blocks, list)
    yield {"type": "message_start", "message": {**body, "content": [], "stop_reason": None}}
    for i, block in enumerate(blocks):
        assert isinstance(block, dict)
        empty, delta = _streamed(block)
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    stopped: Body = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stopped, "usage": body["usage"]}
    yield {"type": "message_stop"}


def _streamed(block: Body) -> tuple[Body, Body]:
    """Block with its content emptied, and the delta that carries the content."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            said = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": said}


def _messages(where: str, message: TurnMessage) -> Iterator[Message]:
    """Messages of one user or assistant turn; a user's tool results precede its text."""
    blocks = [Block("text", text=message.content)] if isinstance(message.content, str) else message.content
    allowed = {"user": {"text", "tool_result"}, "assistant": {"text", "tool_use", "thinking", "redacted_thinking"}}
    if message.role not in allowed:
        raise Refusal(f"{where}.role", "'user' or 'assistant'", message.role)
    for block in blocks:
        if block.type not in allowed[message.role]:
            raise Refusal(f"{where}.content", f"blocks of {', '.join(sorted(allowed[message.role]))}", block.type)
    text = "".join(block.text for block in blocks if block.type == "text")
    if message.role == "assistant":
        used = [block for block in blocks if block.type == "tool_use"]
        calls = tuple(ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False)) for block in used)
        yield Message(Role.ASSISTANT, text, calls)
        return
    for block in blocks:
        if block.type == "tool_result":
            yield Message(Role.TOOL, _text(where, block.content), tool_call_id=block.tool_use_id)
    if any(block.type == "text" for block in blocks):
        yield Message(Role.USER, text)


def _text(where: str, content: str | list[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise Refusal(where, "blocks of text", block.type)
    return "".join(block.text for block in content)
