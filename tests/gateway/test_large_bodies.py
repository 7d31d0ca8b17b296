"""A large body of one client, and the wait of another."""

import asyncio
import io
import json
import time

import aiohttp
import pytest

from gateway_engine import Served, served

SIZE = 8 * 1024 * 1024
LONGEST_WAIT_S = 0.2
"""Processor time of this process meanwhile, five times the worst; that of other processes says nothing of a server."""


def filled(head: str, one: str, tail: str, most: int = SIZE) -> bytes:
    """Body of as many equal entries as fit."""
    count = (most - len(head) - len(tail)) // (len(one) + 1)
    return (head + ",".join([one] * count) + tail).encode()


def called(text: str) -> dict[str, object]:
    """A call with a long argument."""
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}


TEXT, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = '{"role":"user","content":"x"}'
LONG = "ab " * (SIZE // 3 - 100)
BODIES = {
    "prompts": (TEXT, filled('{"prompt":[', '""', "]}")),
    "prompts of tokens": (TEXT, filled('{"prompt":[', "[1]", "]}")),
    "tokens": (TEXT, filled('{"prompt":[', "1", "]}")),
    "messages": (CHAT, filled('{"messages":[', '{"role":"user","content":""}', "]}")),
    "parts": (CHAT, filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}")),
    "stops": (CHAT, filled(f'{{"messages":[{ASK}],"stop":[', '""', "]}")),
    "tools": (CHAT, filled(f'{{"messages":[{ASK}],"tools":[', '{"type":"function","function":{"name":"a"}}', "]}")),
    "one long text": (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": LONG}]}).encode(),
    ),
    "a long prompt": (TEXT, json.dumps({"prompt": LONG}).encode()),
    "the arguments of a call": (
        CHAT,
        json.dumps(
            {"messages": [json.loads(ASK), {"role": "assistant", "content": "", "tool_calls": [called(LONG)]}]}
        ).encode(),
    ),
    "a thought": (
        CHAT,
        json.dumps(
            {"messages": [json.loads(ASK), {"role": "assistant", "content": "", "reasoning_content": LONG}]}
        ).encode(),
    ),
    "a tool's description": (
        CHAT,
        json.dumps(
            {
                "messages": [json.loads(ASK)],
                "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
            }
        ).encode(),
    ),
    "most messages": (CHAT, filled('{"messages":[', ASK, "]}", 8000 * (len(ASK) + 1))),
    "bias": (
        CHAT,
        (f'{{"messages":[{ASK}],"logit_bias":{{' + ",".join(f'"{i}":1' for i in range(700_000)) + "}}").encode(),
    ),
    "blocks": (
        MESSAGES,
        filled('{"max_tokens":1,"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"),
    ),
    "items": (RESPONSES, filled('{"input":[', '{"role":"user","content":""}', "]}")),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_large_body_of_one_client_hardly_delays_another(kind: str) -> None:
    path, body = BODIES[kind]
    waits = list[float]()

    async def asking(one: Served, http: aiohttp.ClientSession) -> None:
        while True:
            before_s = time.process_time()
            try:
                await asyncio.sleep(0)
                async with http.get(f"{one.url}/health") as answer:
                    assert answer.status == 200
            finally:
                waits.append(time.process_time() - before_s)  # of a request that the end cancels, too

    async def scenario() -> None:
        async with (
            served(is_open=True, max_body_bytes=SIZE) as one,
            aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http,
        ):
            other = asyncio.create_task(asking(one, http))
            try:
                async with http.post(one.url + path, data=io.BytesIO(body)) as answer:
                    assert answer.status in (200, 400), await answer.text()
            finally:
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)

    asyncio.run(scenario())
    assert max(waits) < LONGEST_WAIT_S


def deep(depth: int, opened: str = '{"a":', closed: str = "}") -> str:
    return opened * depth + "{}" + closed * depth


def deep_bodies(depth: int) -> list[tuple[str, str]]:
    """Paths and bodies with arguments, tools and schemas of a depth."""
    value, schema = deep(depth), deep(depth, '{"properties":{"a":', "}}")
    call = f'{{"id":"a","type":"function","function":{{"name":"f","arguments":{json.dumps(value)}}}}}'
    used = f'{{"type":"tool_use","id":"a","name":"f","input":{value}}}'
    spoken = (
        f'{{"role":"function_call","type":"function_call","call_id":"a","name":"f","arguments":{json.dumps(value)}}}'
    )
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    form = f'{{"type":"json_schema","json_schema":{{"name":"a","schema":{schema}}}}}'
    return [
        (CHAT, f'{{"messages":[{ASK},{{"role":"assistant","content":"","tool_calls":[{call}]}},{ASK}]}}'),
        (CHAT, f'{{"messages":[{ASK}],"tools":[{tool}]}}'),
        (CHAT, f'{{"messages":[{ASK}],"tools":[{tool}],"tool_choice":"required"}}'),
        (CHAT, f'{{"messages":[{ASK}],"response_format":{form}}}'),
        (MESSAGES, f'{{"max_tokens":5,"messages":[{ASK},{{"role":"assistant","content":[{used}]}},{ASK}]}}'),
        (MESSAGES + "/count_tokens", f'{{"messages":[{ASK}],"tools":[{{"name":"f","input_schema":{schema}}}]}}'),
        (RESPONSES, f'{{"input":[{ASK},{spoken}]}}'),
    ]


@pytest.mark.parametrize("depth", [200, 300, 480, 490, 700, 960, 5000])
async def test_a_deep_body_is_answered_or_refused(depth: int) -> None:
    async with (
        served(is_open=True, max_body_bytes=SIZE) as one,
        aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http,
    ):
        token = one.gateway.sessions.open().token
        for path, body in deep_bodies(depth):
            for root in (one.url, f"{one.url}/s/{token}"):
                async with http.post(root + path, data=body.encode()) as answer:
                    assert answer.status in (200, 400), (path, await answer.text())
