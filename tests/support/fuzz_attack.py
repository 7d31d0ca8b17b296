"""Hostile requests against one HTTP server, whatever it serves.

Bodies of every route, with values put where they do not belong, bytes flipped, cut off, nested deep or far too large;
wrong tokens, headers, methods and paths; clients that hang up. What is looked for: a status of 500 and above but 503, a
request that is not answered, and memory that grows.
"""

import asyncio
import io
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yarl

ANSWER_TIMEOUT_S = 60.0
RENEWED_EVERY = 40
LARGE_BYTES = 10 << 20
FULL = 503
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
WORDS = ["", "x", "../../etc/passwd", "%00", "%2e%2e%2f", "a" * 3000, "%ff%fe"]
RAW = [
    b"\x16\x03\x01\x02\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST @ HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST @ HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n{",
    b"POST @ HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST @ HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
]


def as_json(body: Any, dice: random.Random) -> bytes:
    """A body as most servers take it."""
    return json.dumps(body).encode()


async def nothing_new(http: aiohttp.ClientSession, url: str, known: Mapping[str, str]) -> dict[str, str]:
    """For servers without sessions."""
    return {}


@dataclass(frozen=True)
class Target:
    """What one server answers. `{name}`, in a path or as a text of a body, is what `renew` gave by that name."""

    posts: Mapping[str, Any]
    """An honest body of each route that takes one."""
    gets: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    encode: Callable[[Any, random.Random], bytes] = as_json
    renew: Callable[[aiohttp.ClientSession, str, Mapping[str, str]], Awaitable[dict[str, str]]] = nothing_new


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


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """The value with names replaced by what they stand for."""
    if isinstance(value, dict):
        return {name: filled(part, known) for name, part in value.items()}
    return known.get(value[1:-1], value) if isinstance(value, str) and value.startswith("{") else value


def spoilt(data: bytes, dice: random.Random) -> bytes:
    """The bytes cut off, flipped, with some that are no UTF-8, or none at all."""
    at = dice.randrange(len(data) + 1)
    noise = bytes(dice.choices(range(256), k=dice.randrange(1, 9)))
    return dice.choice([data[:at], data[:at] + noise + data[at:], data[:at] + b"\xff" + data[at + 1 :], b"", noise])


@dataclass
class Attack:
    """One client's requests. `found` is what must not be."""

    name: str
    url: str
    target: Target
    dice: random.Random
    statuses: Counter[int] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)

    async def run(self, requests: int) -> None:
        """So many, one after another."""
        timeout = aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
            for i in range(requests):
                if i % RENEWED_EVERY == 0:
                    self.known = await self.target.renew(http, self.url, self.known)
                await (self.raw() if self.dice.random() < 0.02 else self.asked(http))

    async def raw(self) -> None:
        """What is no HTTP, or only half of it; then the client is gone."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self.dice.choice(RAW).replace(b"@", self.dice.choice([*self.target.posts, "/"]).encode()))
            await asyncio.wait_for(reader.read(100), 0.05)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        self.statuses[0] += 1

    async def asked(self, http: aiohttp.ClientSession) -> None:
        """One request over HTTP."""
        method, path, data, headers = self.request()
        patience_s = self.dice.choices([ANSWER_TIMEOUT_S, 0.005], [30, 1])[0]
        url = yarl.URL(self.url + path, encoded=True)
        try:
            async with asyncio.timeout(patience_s):
                body = io.BytesIO(data) if data else None
                async with http.request(method, url, data=body, headers=headers) as answer:
                    said = await answer.read()
        except (aiohttp.ClientError, ConnectionError):
            self.statuses[-1] += 1  # a large body is refused before it is sent
            return
        except TimeoutError:
            self.statuses[0] += 1
            if patience_s == ANSWER_TIMEOUT_S:
                self.found.append(f"{self.name}: no answer: {method} {path} {data[:300]!r}")
            return
        self.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status != FULL:
            self.found.append(f"{self.name}: {answer.status}: {method} {path} {data[:2000]!r} -> {said[:300]!r}")

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        """Method, path, body and headers: mostly nearly right, as what is quite wrong is refused at the door."""
        dice, target = self.dice, self.target
        names = {name: dice.choice(WORDS) if dice.random() < 0.05 else value for name, value in self.known.items()}
        posts = not target.gets or dice.random() < 0.85
        route = dice.choice(list(target.posts) if posts and target.posts else list(target.gets))
        path = route.format(**names) + (f"?{dice.choice(WORDS)}={dice.choice(WORDS)}" if dice.random() < 0.05 else "")
        headers = dict(target.headers)
        if dice.random() < 0.1:
            headers["Authorization"] = dice.choice(["Bearer", "Basic x", "Bearer " + "y" * 5000, "\t"])
        if dice.random() < 0.05:
            headers["Host"] = dice.choice(["example.org", "x" * 300, "[::1", "127.0.0.1:x"])
        if dice.random() < 0.05:
            headers["Cookie"] = dice.choice(["visitor=x", "visitor=" + "a" * 5000, ";;;=", "shoal_view=%00"])
        if not posts or not target.posts:
            return dice.choices(["GET", "HEAD", "POST", "DELETE"], [40, 1, 1, 1])[0], path, b"", headers
        headers["Content-Type"] = dice.choice([*[target.media_type] * 19, "text/plain"])
        if dice.random() < 0.1:
            headers["x-stainless-retry-count"] = dice.choice(["1", "x", "-1", "9" * 50])
        return dice.choices(["POST", "GET", "PUT", "DELETE"], [60, 1, 1, 1])[0], path, self.body(route), headers

    def body(self, route: str) -> bytes:
        """A mutated one."""
        dice, body = self.dice, filled(self.target.posts[route], self.known)
        for _ in range(dice.choice([0, 1, 1, 1, 2, 5])):
            body = mutated(body, dice)
        data = self.target.encode(body, dice)
        if dice.random() < 0.15:
            data = spoilt(data, dice)
        return b'{"messages": "' + b"x" * LARGE_BYTES + b'"}' if dice.random() < 0.002 else data
