"""Engine of a rehearsal: a replica of the real pool that samples in virtual time.

All running sequences advance together, a token per decode step. A decode step's seconds depend on the number of
sequences and their context, so the time to the next end follows from a quadratic equation between two events.

A token of a rehearsal stands for `unit` tokens of the model. The first token's id is the planned length of the answer,
so another engine can continue an aborted one; the last one's is `STOP`.
"""

import asyncio
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path

from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import EngineUnavailable
from shoal.interfaces import EngineInfo
from shoal.rehearsal.costs import EngineCost
from shoal.types import Completion, FinishReason, Sampling

STOP = 1
LOGPROB = -0.5
FIRST_LENGTH = 2
"""Smallest planned length in ids: `STOP` and smaller are other tokens."""

Length = Callable[[random.Random], int]
"""Draws the tokens of an answer."""


@dataclass(slots=True, eq=False)
class Decoding:
    """One answer that an engine samples."""

    planned: int
    """Tokens of the whole answer."""
    begun: int
    """Tokens of it that the request brought."""
    context: int
    """Tokens of prompt and brought tokens."""
    to_compute: int
    """Tokens of the context that no other sequence has computed."""
    ended: asyncio.Future[Completion]
    started_at: float = 0.0
    """Value of the engine's count of decode steps at its first token."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Version and number of own tokens sampled before it, for each Version."""

    @property
    def left(self) -> int:
        """Tokens that the request samples."""
        return max(self.planned - self.begun, 1)


class RehearsedEngine:
    """Implements `PoolEngine`. `fails` raises or waits before each call, for faults."""

    def __init__(self, cost: EngineCost, length: Length, unit: int, prompt_tokens: int, max_model_len: int) -> None:
        self.cost, self._length, self._unit, self._max_model_len = cost, length, unit, max_model_len
        self._prompt_tokens = prompt_tokens
        self.version, self.busy_s, self.sampled, self.prefilled, self.interruptions = 0, 0.0, 0, 0, 0
        self.paused = False
        self._waiting: list[tuple[int, int, Decoding]] = []
        self._running: list[tuple[float, int, Decoding]] = []  # by the count of decode steps at their end
        self._number = count()
        self._steps = 0.0
        self._at_s, self._looked_s, self._busy_before_s, self._free_s = 0.0, 0.0, 0.0, 0.0
        self._context = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, adapter: str = ""
    ) -> list[Completion]:
        """Samples answers of planned lengths. Raises `EngineUnavailable` when it is killed meanwhile."""
        loop, begun = asyncio.get_running_loop(), sampling.begun
        rng = random.Random(sampling.seed)
        asked = []
        for index in range(n):
            planned = prompt_ids[len(prompt_ids) - begun] - FIRST_LENGTH if begun else self._length(rng)
            real = min(begun * self._unit, max(planned - 1, 0))
            context = self._prompt_tokens + real
            asked.append(Decoding(planned, real, context, 0 if index else context, loop.create_future()))
        for one in asked:
            heapq.heappush(self._waiting, (-priority, next(self._number), one))
        self._advance()
        try:
            return [await one.ended for one in asked]
        finally:
            if any(not one.ended.done() for one in asked):
                self._forget({id(one) for one in asked})

    async def update_weights(self, version: int, path: Path) -> None:
        """Loads weights: nothing is sampled meanwhile, and running answers are computed again under them."""
        self._advance()
        self.paused = True
        self._schedule()
        await asyncio.sleep(self.cost.load_s)
        self._advance()
        self.paused, self.version = False, version
        if self._running:
            self.interruptions += 1
            again = int(self._context)
            self.prefilled += again
            self._compute(again * self.cost.prefill_s)
            for _, _, one in self._running:
                one.versions.append((version, int(self._steps - one.started_at)))
        self._advance()

    async def abort(self) -> None:
        """Ends all requests with the tokens sampled so far."""
        for one in self._dropped():
            own = int(self._steps - one.started_at) if one.versions else 0
            one.ended.set_result(self._completion(one, min(own, one.left - 1), FinishReason.ABORT))

    def kill(self) -> None:
        """Ends all requests without an answer, as a lost host does."""
        for one in self._dropped():
            one.ended.set_exception(EngineUnavailable("the host is gone"))
            one.ended.exception()  # the caller may have left by the failure of another one

    def _dropped(self) -> list[Decoding]:
        """Forgets all requests; returns those whose caller still waits."""
        self._advance()
        everyone = [one for *_, one in (*self._running, *self._waiting)]
        self._running, self._waiting, self._context = [], [], 0.0
        self._schedule()
        return [one for one in everyone if not one.ended.done()]

    async def info(self) -> EngineInfo:
        """Figures since the start, and the busy share since the last call."""
        self._advance()
        now_s = asyncio.get_running_loop().time()
        busy = (self.busy_s - self._busy_before_s) / max(now_s - self._looked_s, 1e-9)
        self._looked_s, self._busy_before_s = now_s, self.busy_s
        running, waiting = len(self._running), len(self._waiting)
        return EngineInfo(
            self.version,
            "",
            self._max_model_len,
            min(max(busy, 0.0), 1.0),
            self.sampled,
            self.prefilled,
            self.interruptions,
            running,
            waiting,
            foreign=True,
        )

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
    ) -> ScoreResponse:
        """Logprobs of a row, after its prefill."""
        await asyncio.sleep(len(token_ids) * self._unit * self.cost.prefill_s)
        return ScoreResponse([LOGPROB] * (len(token_ids) - 1))

    async def alive(self) -> None:
        """Returns at once."""

    async def aclose(self) -> None:
        """Forgets its timer."""
        if self._timer is not None:
            self._timer.cancel()

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        """Not used: the pool of a run serves Versions."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> dict[str, int]:
        """Not used: the pool of a run serves Versions."""
        raise NotImplementedError

    def _compute(self, seconds: float) -> None:
        """Adds work that no sequence advances during."""
        self._free_s = max(self._free_s, self._at_s) + seconds
        self.busy_s += seconds

    def _advance(self) -> None:
        """Brings the sequences to now: ends those that are done, and starts others in their places."""
        now_s = asyncio.get_running_loop().time()
        self._pass(now_s)
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, _, one = heapq.heappop(self._running)
            self._context -= one.context + one.left
            if not one.ended.done():
                one.ended.set_result(self._completion(one, one.left, FinishReason.STOP))
        if not self.paused:
            while self._waiting and len(self._running) < self.cost.places:
                self._start(heapq.heappop(self._waiting)[2])
        if not self._running:
            self._context = 0.0
        self._schedule()

    def _start(self, one: Decoding) -> None:
        self.prefilled += one.to_compute
        self._compute(one.to_compute * self.cost.prefill_s)
        one.started_at = self._steps
        one.versions = [(self.version, 0)]
        self._context += one.context
        heapq.heappush(self._running, (self._steps + one.left, next(self._number), one))

    def _pass(self, now_s: float) -> None:
        """Counts the decode steps since the last event."""
        began_s = min(max(self._at_s, self._free_s), now_s)
        span_s, self._at_s = now_s - began_s, now_s
        n = len(self._running)
        if self.paused or not n or span_s <= 0:
            return
        base_s, grown_s = self.cost.base_s(n) + self._context * self.cost.context_s, n * self.cost.context_s
        # base * k + grown * k^2 / 2 = span, for k decode steps
        root = math.sqrt(base_s * base_s + 2 * grown_s * span_s)
        steps = 2 * span_s / (base_s + root)
        self._steps += steps
        self._context += n * steps
        self.busy_s += span_s

    def _schedule(self) -> None:
        """Sets the timer to the next end of a sequence."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.paused or not self._running:
            return
        left = max(self._running[0][0] - self._steps, 0.0)
        n = len(self._running)
        seconds = left * (self.cost.base_s(n) + self._context * self.cost.context_s)
        seconds += left * left / 2 * n * self.cost.context_s
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(loop.time(), self._free_s) + seconds, self._advance)

    def _forget(self, gone: set[int]) -> None:
        """Removes requests whose caller has left."""
        self._advance()
        for end, _, one in self._running:
            if id(one) in gone:
                self._context -= one.context + one.left - (end - self._steps)
        self._running = [entry for entry in self._running if id(entry[2]) not in gone]
        self._waiting = [entry for entry in self._waiting if id(entry[2]) not in gone]
        heapq.heapify(self._running)
        heapq.heapify(self._waiting)
        self._advance()

    def _completion(self, one: Decoding, tokens: int, reason: FinishReason) -> Completion:
        """The answer of `tokens` own tokens, in units, with the Version of each."""
        self.sampled += tokens
        unit = self._unit
        size = -(-tokens // unit) if reason is FinishReason.STOP else tokens // unit
        starts = [-(-before // unit) for _, before in one.versions] + [size]
        spans = tuple(
            (version, min(end, size) - min(start, size))
            for (version, _), start, end in zip(one.versions, starts, starts[1:], strict=False)
        )
        first = 0 if one.begun else one.planned + FIRST_LENGTH
        return completion(first, spans, reason)


@lru_cache(maxsize=1 << 14)
def completion(first: int, spans: tuple[tuple[int, int], ...], reason: FinishReason) -> Completion:
    """A completion of so many tokens of each Version; equal ones are one object, since they are frozen."""
    versions = tuple(version for version, size in spans for _ in range(size))
    ids = [0] * len(versions)
    if ids and first:
        ids[0] = first
    if ids and reason is FinishReason.STOP:
        if first and len(ids) == 1:  # one token is both the length and the stop
            ids, versions = [first, STOP], versions * 2
        else:
            ids[-1] = STOP
    return Completion(tuple(ids), (LOGPROB,) * len(ids), versions, reason)
