"""The largest bodies that servers admit, and another client's wait: `python tests/support/fuzz_large.py judge`.

Servers are gateway, engine, human, judge and tinker.

Parts of each route's body are replaced by kinds of large values: every part by every kind, or so many of these pairs as
a number says, as in `gateway tinker 12`; gateway and Tinker server have routes and parts for hours. The wait is the
longest of a client that asks for a small page again and again: the smaller of its time and of the server's processor
time meanwhile, as the machine may be busy with other things. The worst of each server is printed, with its memory per
byte of the body; status 0 is a body that was refused before it was read.
"""

import asyncio
import io
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.processes import commit
from fuzz_attack import Target, as_json, filled
from fuzz_servers import targets
from shoal.run.demo_model.architecture import Shape, save, untrained
from tinker_server import KEYS, tinker_serving

PAGES = {
    "gateway": "/health",
    "engine": "/health",
    "human": "/api/status",
    "judge": "/leaderboard.json",
    "tinker": "/api/v1/healthz",
}
"""The other client's page, of each server that takes bodies."""
LIMIT = re.compile(rb"expected at most (\d+) bytes")
HERE = "@large@"
ASKED_BYTES = 64 << 20
"""Size of the first body, which each server refuses by its own limit."""
ROOM_BYTES = 4096
"""For the rest of the body."""
AFTER_S, SHORT_S = 0.2, 0.02
"""Seconds after an answer or a wait that is not short, in which a server may still work on what it promised."""
PLAIN = {
    "text": lambda size: "ab " * (size // 3),
    "other letters": lambda size: "\u00e9\u4e2d" * (size // 12),
    "numbers": lambda size: [1] * (size // 3),
    "texts": lambda size: [""] * (size // 4),
    "lists": lambda size: [[]] * (size // 4),
    "objects": lambda size: [{}] * (size // 4),
    "names": lambda size: {str(number): 1 for number in range(size // 14)},
    "messages": lambda size: [{"role": "user", "content": "x", "type": "text", "text": ""}] * (size // 66),
}
"""Values of about so many bytes as JSON."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The longest wait of a server's other client, or its largest memory."""

    value: float
    path: str = ""
    part: str = ""
    kind: str = ""
    status: int = 0


def parts(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a body, itself included."""
    yield before
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from parts(part, (*before, key))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The body with another value at a place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


class Server:
    """One server under large bodies."""

    def __init__(self, name: str, url: str, target: Target, process: psutil.Process) -> None:
        self.page, self.url, self._target, self._process = url + PAGES[name], url, target, process
        self.statuses, self.most_bytes = Counter[int](), 0
        self.wait_s, self.memory = Worst(0.0), Worst(0.0)

    async def run(self, kinds: Mapping[str, Any], each: int) -> None:
        """Sends at most so many bodies to each route, one after the other."""
        headers = {**self._target.headers, "Content-Type": self._target.media_type}
        # A server closes a connection that waits for some seconds, as until the next body is made.
        connector = aiohttp.TCPConnector(keepalive_timeout=1.0)
        cookies = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=cookies) as http:
            for path, honest in self._target.posts.items():
                known = await self._target.renew(http, self.url, {})
                url, body = self.url + path.format(**known), filled(honest, known)
                if not (most_bytes := await self._most_bytes(http, url)):
                    continue  # it reads no body
                self.most_bytes = most_bytes
                pairs = list(itertools.product(parts(body), kinds))
                for place, kind in random.Random(path).sample(pairs, min(each, len(pairs))):
                    data = self._encoded(body, place, kinds[kind])
                    await self._tried(http, url, data, Worst(0, path, ".".join(map(str, place)), kind))

    async def _most_bytes(self, http: aiohttp.ClientSession, url: str) -> int:
        """Size of the largest body that a route admits; 0 when it says none."""
        for _ in range(3):  # a refusal may be lost while the rest of the body is on its way
            _, refused = await self._sent(http, url, b" " * ASKED_BYTES)
            if found := LIMIT.search(refused):
                return int(found[1])
        return 0

    def _encoded(self, body: Any, place: tuple[Any, ...], large: Callable[[int], Any]) -> bytes:
        """The largest body with the value in a place that the server admits, or about a half of it."""
        size = self.most_bytes - ROOM_BYTES
        while len(data := self._written(body, place, large(size))) > self.most_bytes:
            size //= 2
        return data

    def _written(self, body: Any, place: tuple[Any, ...], value: Any) -> bytes:
        if self._target.encode is not as_json:
            return self._target.encode(replaced(body, place, value), random.Random(0))
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return json.dumps(replaced(body, place, HERE)).replace(f'"{HERE}"', text).encode()

    async def _tried(self, http: aiohttp.ClientSession, url: str, data: bytes, what: Worst) -> None:
        before_bytes, most_bytes, longest_s = self._process.memory_info().rss, 0, 0.0
        posting = asyncio.create_task(self._sent(http, url, data))
        calm_s = 0.0
        while not posting.done() or time.monotonic() < calm_s:
            began_s, used_s = time.monotonic(), self._used_s()
            async with http.get(self.page) as answer:
                await answer.read()
            wait_s = min((now_s := time.monotonic()) - began_s, self._used_s() - used_s)
            longest_s = max(longest_s, wait_s)
            if wait_s > SHORT_S or not posting.done():
                calm_s = now_s + AFTER_S
            most_bytes = max(most_bytes, self._process.memory_info().rss)
        status, _ = await posting
        self.statuses[status] += 1
        made = {**asdict(what), "status": status}
        self.wait_s = max(self.wait_s, Worst(**{**made, "value": round(longest_s, 3)}), key=lambda worst: worst.value)
        grown = round((most_bytes - before_bytes) / len(data), 1)
        self.memory = max(self.memory, Worst(**{**made, "value": grown}), key=lambda worst: worst.value)

    async def _sent(self, http: aiohttp.ClientSession, url: str, data: bytes) -> tuple[int, bytes]:
        try:
            async with http.post(url, data=io.BytesIO(data)) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientConnectionError:  # it closes the connection on the rest of a refused body
            return 0, b""

    def _used_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


@contextmanager
def _tinker() -> Iterator[tuple[str, Target, psutil.Process]]:
    from fuzz_tinker import target  # it needs the extra `tinker`

    with tempfile.TemporaryDirectory() as folder:
        save(untrained(Shape(width=32, heads=2, feed_forward=64, context=256), 0), Path(folder, "model"))
        with tinker_serving(Path(folder, "model"), Path(folder, "server")) as server:
            yield server.url, target(KEYS[0]), psutil.Process(server.process.pid)


def measured(only: tuple[str, ...] = (), kinds: Mapping[str, Any] = PLAIN, each: int = sys.maxsize) -> dict[str, Any]:
    """The worst of each server that takes bodies."""
    report: dict[str, Any] = {"commit": commit(), "servers": {}}
    chosen = only or tuple(PAGES)
    with ExitStack() as stack:
        served = stack.enter_context(targets(chosen)) if set(chosen) - {"tinker"} else {}
        if "tinker" in chosen:
            served["tinker"] = stack.enter_context(_tinker())
        for name, (url, target, process) in served.items():
            one = Server(name, url, target, process)
            asyncio.run(one.run(kinds, each))
            report["servers"][name] = {
                "bodies": one.statuses.total(),
                "statuses": dict(sorted(one.statuses.items())),
                "body_bytes": one.most_bytes,
                "wait_s": asdict(one.wait_s),
                "memory_per_byte": asdict(one.memory),
            }
    return report


if __name__ == "__main__":
    names, numbers = ([one for one in sys.argv[1:] if one.isdigit() is wanted] for wanted in (False, True))
    report = measured(tuple(names), each=int(numbers[0]) if numbers else sys.maxsize)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
