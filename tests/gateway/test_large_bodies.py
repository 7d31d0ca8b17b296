"""A large body of one client, and the wait of another."""

import asyncio
import io
import json
import time

import aiohttp
import pytest

from gateway_engine import Served, served

SIZE = 8 * 1024 * 1024
LONGEST_WAIT_S = 2.0
"""Twenty times the worst wait on two quiet cores (0.1 s), since tests share their cores."""


def filled(head: str, one: str, tail: str, most: int = SIZE) -> bytes:
    """Body of as many equal entries as fit."""
    count = (most - len(head) - len(tail)) // (len(one) + 1)
    return (head + ",".join([one] * count) + tail).encode()


TEXT, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = '{"role":"user","content":"x"}'
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
        json.dumps({"messages": [{"role": "user", "content": "ab " * (SIZE // 3 - 100)}]}).encode(),
    ),
    "a long prompt": (TEXT, json.dumps({"prompt": "ab " * (SIZE // 3 - 100)}).encode()),
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
            before_s = time.perf_counter()
            await asyncio.sleep(0)
            async with http.get(f"{one.url}/health") as answer:
                assert answer.status == 200
            waits.append(time.perf_counter() - before_s)

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
