"""Hostile requests against a gateway in a process of its own: `python tests/support/gateway_fuzz.py 10000`.

Bodies of every route, with values put where they do not belong, bytes flipped, cut off, nested deep or far too large;
wrong tokens, headers, methods and paths; clients that hang up. What is looked for: a status of 500 and above, a request
that is not answered, and memory that grows.
"""

import asyncio
import io
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvicorn

from chat_templates import renderer
from shoal.gateway import Gateway
from shoal.interfaces import EngineInfo
from shoal.types import Completion, FinishReason, Sampling

CONTEXT = 4096
CLIENTS = 8
ANSWER_TIMEOUT_S = 30.0
SESSION_REQUESTS = 40
LARGE_BYTES = 10 << 20
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
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/completions": {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "echo": False, "logprobs": None},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "temperature": 1.0}},
    "/v1/sessions": {
        "sampling": {"max_tokens": 9, "temperature": 1.0, "stop_token_ids": [1]},
        "limits": {"generations": 5, "age_s": 10.0},
        "history_policy": "strict",
    },
}
TEXTS = [
    "",
    "\ud800",
    "\x00",
    "a" * 10_000,
    "💥" * 999,
    "<|im_end|>",
    "<think>",
    "</tool_call>",
    "shoal0asked0",
    "{{7*7}}",
]
NUMBERS = [0, -1, 1, 1.5, 1e308, -1e-308, 2**31, 2**63, 2**64, -(2**63), float("nan"), float("inf")]
DEEP = json.loads("[" * 300 + "]" * 300)
HOSTILE: list[Any] = [None, True, False, [], {}, [[]], {"type": "image_url"}, DEEP, ["x"] * 999, *TEXTS, *NUMBERS]
TOKENS = ["", "x", "../../etc/passwd", "%00", "%2e%2e%2f", "a" * 3000, "%ff%fe"]
RAW = [
    b"\x16\x03\x01\x02\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
]


class BabblingEngine:
    """Implements `interfaces.Engine`: any tokens at all, special ones too, as often as not in a tool call."""

    def __init__(self, vocabulary: int, call_ids: Sequence[int], stop: int) -> None:
        self._vocabulary, self._call_ids, self._stop = vocabulary, call_ids, stop

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        dice = random.Random(len(prompt_ids))
        await asyncio.sleep(dice.choice([0, 0, 0.01]))
        ids = [dice.randrange(self._vocabulary) for _ in range(dice.randrange(8))]
        ids += [*self._call_ids, self._stop] if dice.random() < 0.5 else [self._stop]
        finish = FinishReason.STOP if len(ids) <= sampling.max_tokens else FinishReason.LENGTH
        ids = ids[: sampling.max_tokens]
        return [Completion(tuple(ids), (-1.0,) * len(ids), (0,) * len(ids), finish)]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise NotImplementedError

    async def update_weights(self, version: int, path: Path) -> None:
        raise NotImplementedError

    async def info(self) -> EngineInfo:
        return EngineInfo(0, "", CONTEXT, 0.0, 0, 0, 0, 0, 0)


async def serve() -> None:
    """Until standard input ends."""
    made = renderer("qwen3")
    call_ids = made.token_ids('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
    engine = BabblingEngine(max(call_ids), call_ids, made.stop_token_ids[0])
    gateway = Gateway(engine, made, max_model_len=CONTEXT, is_open=True)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(gateway.app, log_level="error", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    sys.stdout.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with one of its parts replaced, removed, repeated or renamed."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        match dice.randrange(6):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {**value, dice.choice(["extra", "stop", "n", "\ud800", key.upper()]): dice.choice(HOSTILE)}
            case _:
                return {**value, key: mutated(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        match dice.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + value[at:]
            case _:
                return [*value[:at], mutated(value[at], dice), *value[at + 1 :]]
    return dice.choice(HOSTILE)


def spoilt(data: bytes, dice: random.Random) -> bytes:
    """The bytes cut off, flipped, with some that are no UTF-8, or none at all."""
    at = dice.randrange(len(data) + 1)
    noise = bytes(dice.choices(range(256), k=dice.randrange(1, 9)))
    return dice.choice([data[:at], data[:at] + noise + data[at:], data[:at] + b"\xff" + data[at + 1 :], b"", noise])


@dataclass
class Attack:
    """One client's requests. `found` is what must not be."""

    url: str
    dice: random.Random
    statuses: Counter[int] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)
    token: str = ""

    async def run(self, requests: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)) as http:
            for i in range(requests):
                if i % SESSION_REQUESTS == 0:
                    await self.renew(http)
                await (self.raw() if self.dice.random() < 0.02 else self.posted(http))

    async def renew(self, http: aiohttp.ClientSession) -> None:
        if self.token:
            async with http.post(f"{self.url}/s/{self.token}/end") as answer:
                await answer.read()
        async with http.post(f"{self.url}/v1/sessions", json={}) as answer:
            self.token = (await answer.json())["api_key"]

    async def raw(self) -> None:
        """What is no HTTP, or only half of it; then the client is gone."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self.dice.choice(RAW))
            await asyncio.wait_for(reader.read(100), 0.05)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        self.statuses[0] += 1

    async def posted(self, http: aiohttp.ClientSession) -> None:
        path, data, headers = self.request()
        method = self.dice.choices(["POST", "GET", "PUT", "DELETE"], [60, 1, 1, 1])[0]
        patience_s = self.dice.choices([ANSWER_TIMEOUT_S, 0.005], [30, 1])[0]
        try:
            async with asyncio.timeout(patience_s):
                async with http.request(method, aiohttp.client.URL(self.url + path, encoded=True), data=io.BytesIO(data), headers=headers) as answer:  # fmt: skip  # noqa: E501
                    body = await answer.read()
        except (aiohttp.ClientError, ConnectionError):
            self.statuses[-1] += 1  # a large body is refused before it is sent
            return
        except TimeoutError:
            self.statuses[0] += 1
            if patience_s == ANSWER_TIMEOUT_S:
                self.found.append(f"no answer: {path} {data[:300]!r}")
            return
        self.statuses[answer.status] += 1
        if answer.status >= 500:
            self.found.append(f"{answer.status}: {method} {path} {data[:2000]!r} -> {body[:300]!r}")

    def request(self) -> tuple[str, bytes, dict[str, str]]:
        route = self.dice.choice(list(BODIES))
        body: Any = {**BODIES[route], "stream": True} if self.dice.random() < 0.2 else BODIES[route]
        for _ in range(self.dice.choice([0, 1, 1, 1, 2, 5])):
            body = mutated(body, self.dice)
        data = json.dumps(body).encode()
        if self.dice.random() < 0.15:
            data = spoilt(data, self.dice)
        if self.dice.random() < 0.002:
            data = b'{"messages": "' + b"x" * LARGE_BYTES + b'"}'
        token = self.dice.choice(TOKENS) if self.dice.random() < 0.05 else self.token
        prefix = f"/s/{token}" if self.dice.random() < 0.8 and route != "/v1/sessions" else ""
        headers = {"Content-Type": self.dice.choice([*["application/json"] * 19, "text/plain"])}
        if self.dice.random() < 0.1:
            headers["x-stainless-retry-count"] = self.dice.choice(["1", "x", "-1", "9" * 50])
        if self.dice.random() < 0.1:
            headers["Authorization"] = self.dice.choice(["Bearer", "Basic x", "Bearer " + "y" * 5000, "\t"])
        return prefix + route, data, headers


def fuzz(requests: int, seed: int = 0) -> dict[str, Any]:
    """What became of so many requests, and the server's memory before and after."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            url = child.stdout.readline().strip()
            server = psutil.Process(child.pid)
            asyncio.run(attacked(url, max(CLIENTS, requests // 5), seed + 1))  # what is loaded and cached once
            before = server.memory_info().rss
            attacks = asyncio.run(attacked(url, requests, seed))
            after = server.memory_info().rss
        finally:
            child.stdin.close()
    statuses = sum((attack.statuses for attack in attacks), Counter[int]())
    return {
        "requests": statuses.total(),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "found": [one for attack in attacks for one in attack.found],
        "rss_before_mb": round(before / 1e6, 1),
        "rss_after_mb": round(after / 1e6, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


async def attacked(url: str, requests: int, seed: int) -> list[Attack]:
    attacks = [Attack(url, random.Random(f"{seed} {i}")) for i in range(CLIENTS)]
    await asyncio.gather(*(attack.run(requests // CLIENTS) for attack in attacks))
    return attacks


if __name__ == "__main__":
    if len(sys.argv) > 1:
        report = fuzz(int(sys.argv[1]), *map(int, sys.argv[2:]))
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        sys.exit(bool(report["found"]))
    asyncio.run(serve())
