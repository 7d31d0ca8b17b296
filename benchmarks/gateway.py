"""What the gateway adds to the time that an engine takes, with a thousand conversations under way.

The gateway has a process, the clients another; the engine in the gateway's process takes an answer of 48 tokens from a
table, after 1 to 2 s. A session asks five times and waits 1 to 3 s between an answer and the next question, as an
agent does that runs a tool. Sessions are replaced as they end, so that so many are open all the time.

    p50_ms, p99_ms         from a request's first byte to the last byte of its answer, as the clients' process sees
                           them, less the time that the engine said it takes: the network, waits for the clients'
                           process and any lateness of timers included
    requests_per_s         how many were answered per second meanwhile
    saturated_per_s        how many can be, when neither engine nor clients ever wait
    lost                   requests without an answer, and answers that their session's export does not have
    retokenised            tokens of the exports that are not the drawn ones, where they were drawn; the exports are
                           kept, and looked at when nothing is measured any more
"""

import asyncio
import gc
import itertools
import random
import re
import time
from dataclasses import dataclass, field
from typing import cast

import msgspec
import psutil
import uvloop

from benchmarks.echo import answer_ids, answer_s
from benchmarks.processes import announced
from shoal.gateway.sessions import Export
from shoal.net.collection import collect_rarely
from shoal.types import seed_for

Report = dict[str, object]
TURNS = 5
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Load:
    """How many sessions are open at once, how long everybody takes, and for how long all this is measured."""

    open_sessions: int
    answer_s: tuple[float, float]
    pause_s: tuple[float, float]
    seconds: float

    @property
    def cycle_s(self) -> float:
        """From a request to the next of the same session, on average."""
        return (sum(self.answer_s) + sum(self.pause_s)) / 2


FULL = Load(1000, (1.0, 2.0), (1.0, 3.0), 45.0)
QUICK = Load(40, (0.05, 0.1), (0.05, 0.15), 1.5)
SATURATED = Load(16, (0.0, 0.0), (0.0, 0.0), 10.0)


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    added_s: list[float] = field(default_factory=list)
    answered: int = 0
    lost: int = 0
    retokenised: int = 0
    sessions: int = 0
    exports: list[tuple[bytes, list[int]]] = field(default_factory=list)
    """What each session handed out, and the seeds of its answers."""

    def check(self) -> None:
        """Counts what the exports have not, or have otherwise than it was drawn."""
        for export, seeds in self.exports:
            _check(msgspec.json.decode(export, type=Export), seeds, self)
        self.exports.clear()


class ChatMessage(msgspec.Struct):
    """What a client keeps of an answer."""

    role: str
    content: str


class ChatChoice(msgspec.Struct):
    """The one choice."""

    message: ChatMessage


class ChatAnswer(msgspec.Struct):
    """An answer as far as a client reads it."""

    choices: list[ChatChoice]


class Opened(msgspec.Struct):
    """Where a session is."""

    api_key: str


def measure(quick: bool) -> Report:
    """The figures of the module's text."""
    thresholds = gc.get_threshold()
    answer_ids(0)  # makes them all
    collect_rarely()
    try:
        return uvloop.run(_measured(QUICK if quick else FULL, QUICK.seconds if quick else SATURATED.seconds))
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _measured(load: Load, saturated_s: float) -> Report:
    seen, busy = await _seen(load)
    most, _ = await _seen(Load(SATURATED.open_sessions, (0, 0), (0, 0), saturated_s))
    added_ms = sorted(1e3 * seconds for seconds in seen.added_s)
    return {
        "p50_ms": added_ms[len(added_ms) // 2],
        "p99_ms": added_ms[int(0.99 * len(added_ms))],
        "requests_per_s": len(seen.added_s) / load.seconds,
        "lost": seen.lost + most.lost,
        "retokenised": seen.retokenised + most.retokenised,
        "max_ms": added_ms[-1],
        "open_sessions": load.open_sessions,
        "sessions": seen.sessions,
        "turns": TURNS,
        "gateway_busy": busy,
        "saturated_per_s": len(most.added_s) / saturated_s,
    }


async def _seen(load: Load) -> tuple[Seen, float]:
    """What clients saw between the time when all sessions are open and the end, and the gateway's share of a core."""
    seen = Seen()
    with announced(["-m", "benchmarks.echo", *map(str, load.answer_s)]) as (url, pid):
        process, names = psutil.Process(pid), itertools.count()
        began_s = time.perf_counter() + TURNS * load.cycle_s / 2
        ends_s = began_s + load.seconds
        clients = [_client(url, load, seen, names, i, began_s, ends_s) for i in range(load.open_sessions)]
        running = asyncio.gather(*clients)
        await asyncio.sleep(began_s - time.perf_counter())
        cpu_s = sum(process.cpu_times()[:2])
        await asyncio.sleep(load.seconds)
        busy = (sum(process.cpu_times()[:2]) - cpu_s) / load.seconds
        await running
    seen.check()
    return seen, busy


async def _client(
    url: str, load: Load, seen: Seen, names: "itertools.count[int]", index: int, began_s: float, ends_s: float
) -> None:
    """One session after the other over one connection; the first ones begin one after the other."""
    await asyncio.sleep(load.cycle_s * index / load.open_sessions)
    host, port = url.removeprefix("http://").split(":")
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
    while time.perf_counter() < ends_s:
        await _session(connection, load, seen, next(names), began_s, ends_s)
    await connection.closed()


async def _session(connection: "Connection", load: Load, seen: Seen, name: int, began_s: float, ends_s: float) -> None:
    pauses = random.Random(name)
    _, body = await connection.posted("/v1/sessions", b"{}")
    token = msgspec.json.decode(body, type=Opened).api_key
    messages = [ChatMessage("user", f"what is {name} + 4? Think about it, then answer in a few words, please.")]
    seen.sessions += 1
    seeds = [seed_for("bench gateway", name, turn) for turn in range(TURNS)]
    for seed in seeds:
        asked = _encoder.encode({"model": "echo", "messages": messages, "seed": seed})
        began = time.perf_counter()
        status, body = await connection.posted(f"/s/{token}/v1/chat/completions", asked)
        ended = connection.answered_s
        if status != 200:
            seen.lost += 1
            break
        if began_s <= ended < ends_s:
            seen.added_s.append(ended - began - answer_s(seed, *load.answer_s))
        messages.append(msgspec.json.decode(body, type=ChatAnswer).choices[0].message)
        messages.append(ChatMessage("user", f"the tool says: {seed}. Is that what you expected? Go on."))
        await asyncio.sleep(pauses.uniform(*load.pause_s))
    _, body = await connection.posted(f"/s/{token}/end", b"{}")
    seen.exports.append((body, seeds))


def _check(export: Export, seeds: list[int], seen: Seen) -> None:
    """Every answer is there once, as it was drawn, after the very tokens of the answers before it."""
    seen.lost += abs(len(seeds) - len(export.turns))
    before: list[int] = []
    for turn, seed in zip(export.turns, seeds, strict=False):
        context = turn.prompt_ids[: len(before)]
        seen.retokenised += sum(a != b for a, b in itertools.zip_longest(before, context))
        seen.retokenised += sum(a != b for a, b in itertools.zip_longest(turn.token_ids, answer_ids(seed)))
        before = [*turn.prompt_ids, *turn.token_ids]


class Connection(asyncio.Protocol):
    """A kept-alive connection, without the half millisecond that a whole HTTP client takes for a request."""

    answered_s = 0.0
    """When the last byte of the newest answer came."""

    def __init__(self) -> None:
        self._came = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, _, body = self._came.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if length is not None and len(body) == int(length[1]) and self._answer is not None:
            self.answered_s = time.perf_counter()
            self._answer.set_result((int(head.split()[1]), body))
            self._answer = None

    def connection_lost(self, error: Exception | None) -> None:
        self._gone.set()
        if self._answer is not None:
            self._answer.set_exception(error or ConnectionResetError("the gateway closed the connection"))

    async def posted(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._came = b""
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return await answer

    async def closed(self) -> None:
        """Ends the connection."""
        self._transport.close()
        await self._gone.wait()
