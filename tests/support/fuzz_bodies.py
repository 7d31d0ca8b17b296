"""Honest bodies of the gateway's three protocols, for the fuzzer to spoil."""

from typing import Any

TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what is 3 + 4?"}]},
        {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "temperature": 0.7,
    "top_p": 0.9,
    "max_completion_tokens": 20,
    "seed": 3,
    "logprobs": True,
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "return_token_ids": True,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "what is 3 + 4?"}]},
        {"type": "reasoning", "id": "rs_0", "summary": []},
        {"type": "function_call", "call_id": "abcdefghi", "name": "add", "arguments": '{"x": 3}'},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "7"},
    ],
    "tools": [{"type": "function", **TOOL}],
    "max_output_tokens": 20,
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
}
USED = {"type": "tool_use", "id": "abcdefghi", "name": "add", "input": {"x": 3}}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 20,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "what is 3 + 4?"},
        {"role": "assistant", "content": [{"type": "text", "text": "hm"}, USED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "7"}]},
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
}
