"""Every field and value of the SDKs' types, sent to a gateway: served, or refused with its workaround."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import msgspec
import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as texts
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from sdk_types import Case, cases

from gateway_engine import served
from shoal.gateway.fields import Refusal, Rule, Served
from shoal.gateway.server import DIALECTS

SDKS: dict[str, tuple[str, type]] = {
    "openai chat": ("/v1/chat/completions", chats.CompletionCreateParamsNonStreaming),
    "openai chat, streamed": ("/v1/chat/completions", chats.CompletionCreateParamsStreaming),
    "openai completions": ("/v1/completions", texts.CompletionCreateParamsNonStreaming),
    "openai completions, streamed": ("/v1/completions", texts.CompletionCreateParamsStreaming),
    "openai responses": ("/v1/responses", responses.ResponseCreateParamsNonStreaming),
    "openai responses, streamed": ("/v1/responses", responses.ResponseCreateParamsStreaming),
    "anthropic messages": ("/v1/messages", messages.MessageCreateParamsNonStreaming),
    "anthropic messages, streamed": ("/v1/messages", messages.MessageCreateParamsStreaming),
    "anthropic beta messages": ("/v1/messages", beta_messages.MessageCreateParamsNonStreaming),
}
ASK = {"role": "user", "content": "what is 3 + 4?"}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOLS: Mapping[str, Any] = {
    "/v1/chat/completions": {"type": "function", "function": FUNCTION},
    "/v1/responses": {"type": "function", **FUNCTION},
    "/v1/messages": {"name": "add", "input_schema": {"type": "object"}},
}
NEEDS_A_RESPONSE = "previous_response_id"
"""Field whose legal values are of the session; tests/gateway/test_gateway_responses.py sends it."""


async def test_a_prompt_of_null_and_an_echo_in_a_stream_are_refused_with_what_to_send() -> None:
    async with served(is_open=True) as one, aiohttp.ClientSession() as http:
        for body, said in (
            ({"prompt": None}, "prompt: expected a text or token ids, got None; send the token that begins a text"),
            (
                {"prompt": "a", "echo": True, "stream": True},
                "echo: expected false in a stream, got True; ask for a body",
            ),
        ):
            async with http.post(f"{one.url}/v1/completions", json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["message"]) == (400, said)


def rule_of(rules: Mapping[str, Rule], path: str) -> tuple[str, Rule | None]:
    """The rule of a field or of the nearest one above it, with its path."""
    while path and path not in rules:
        path = path.removesuffix("[]") if path.endswith("[]") else path.rpartition(".")[0]
    return path, rules.get(path)


def requests(path: str, params: type) -> Iterator[Case]:
    """Legal bodies for a route, each with the field in which it differs from a minimal one."""
    rules = DIALECTS[path].fields
    kinds = {name: rule.values for name, rule in rules.items() if isinstance(rule, Served) and rule.values}
    for field, body in cases(params, "", kinds):
        for name in ("messages", "input"):
            if isinstance(body.get(name), list):
                body[name] = [ASK, *body[name]]
        if "tool_choice" in body:
            body.setdefault("tools", [TOOLS[path]])
        if body.get("top_logprobs") and path == "/v1/chat/completions":
            body["logprobs"] = True
        if path == "/v1/responses":
            body.setdefault("input", "what is 3 + 4?")
        for message in body.get("messages", ()) if path == "/v1/messages" else ():
            blocks = message["content"] if isinstance(message.get("content"), list) else []
            if {"tool_use", "thinking", "redacted_thinking"} & {block["type"] for block in blocks}:
                message["role"] = "assistant"
            elif "tool_result" in {block["type"] for block in blocks}:
                message["role"] = "user"
        unlike_others = body.get("prompt", "") is None or (body.get("stream") and body.get("echo"))
        if field and field != NEEDS_A_RESPONSE and not unlike_others:
            yield field, body


def at(body: Any, path: str) -> list[Any]:
    """Values at a path of a body."""
    if not path:
        return [body]
    if path.endswith("[]"):
        return [one for whole in at(body, path[:-2]) if isinstance(whole, list) for one in whole]
    above, _, name = path.rpartition(".")
    return [whole[name] for whole in at(body, above) if isinstance(whole, dict) and name in whole]


def refused(rule: Rule, values: list[Any]) -> bool:
    """Whether a rule refuses one of the values."""
    try:
        for value in values:
            rule.check("", value)
    except Refusal:
        return True
    return False


@pytest.mark.parametrize("sdk", SDKS)
def test_the_table_has_every_field_of_the_sdk(sdk: str) -> None:
    path, params = SDKS[sdk]
    fields = {field for field, value in requests(path, params)}
    rules = DIALECTS[path].fields
    containers = {name for field in rules for name in (field.rpartition(".")[0], field.rpartition("[]")[0])}
    containers |= {name.removesuffix("[]") for name in containers}
    containers |= {rule_name.rpartition(".")[0] for rule_name in containers}
    assert {field for field in fields if rule_of(rules, field)[1] is None} <= containers


@pytest.mark.parametrize("path", DIALECTS)
def test_the_request_has_every_field_that_the_table_calls_served(path: str) -> None:
    def read(kind: msgspec.inspect.Type, path: str) -> Iterator[str]:
        yield path
        match kind:
            case msgspec.inspect.StructType():
                for one in kind.fields:
                    yield from read(one.type, f"{path}.{one.encode_name}" if path else one.encode_name)
            case msgspec.inspect.ListType() if not path.count("[]") > 2:
                yield from read(kind.item_type, f"{path}[]")
            case msgspec.inspect.UnionType():
                for other in kind.types:
                    yield from read(other, path)

    dialect = DIALECTS[path]
    known = set(read(msgspec.inspect.type_info(dialect.kind), ""))
    whole = ("tools[]",) if path == "/v1/chat/completions" else ()
    served = {name for name, rule in dialect.fields.items() if isinstance(rule, Served) and not rule.values}
    assert {name for name in served - known if not name.startswith(whole or ("?",))} == set()
    assert {name for name in known if name and "." not in name and "[]" not in name} <= set(dialect.tables[False].names)


@pytest.mark.parametrize("is_trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("sdk", SDKS)
def test_every_value_of_an_sdk_is_served_or_refused_with_its_workaround(sdk: str, is_trained: bool) -> None:
    path, params = SDKS[sdk]
    dialect = DIALECTS[path]
    rules = dialect.tables[is_trained].rules
    wrong = list[object]()

    async def main() -> None:
        async with served(style="qwen2.5", is_open=True) as one, aiohttp.ClientSession() as http:
            for field, body in requests(path, params):
                name, rule = rule_of(rules, field)
                url = f"{one.url}/s/{one.gateway.sessions.open().token}" if is_trained else one.url
                async with http.post(url + path, json=body) as answer:
                    said = await answer.text()
                if rule is None or not refused(rule, at(body, name)):
                    if answer.status != 200 or "error" in said[:30]:
                        wrong.append(("not served", field, body, answer.status, said))
                    continue
                where = re.escape(name).replace(re.escape("[]"), r"\[\d+\]")
                if answer.status != 400 or not re.search(where, said) or rule.remedy not in said:  # type: ignore[union-attr]
                    wrong.append(("not refused", field, body, answer.status, said))

    asyncio.run(main())
    assert not wrong, "\n".join(map(str, wrong))
