"""Watches engines: their load, for the metrics of a step and the number of groups at once, and their logprobs.

A canary shows the weights of an engine right after a load, by a row that the engine could tell from others.
`EngineMismatch` takes tokens that engines have sampled for the run. It finds an engine that computes with old weights,
or that reports logprobs of other tokens. It cannot find one that samples as it likes and reports true logprobs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median

from shoal.config import EngineConfig
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import SampledRow
from shoal.experience.buffer import Buffer
from shoal.interfaces import Engine, EngineInfo
from shoal.rollout.concurrency import Concurrency
from shoal.trainer.messages import Logprobs

POLL_S = 0.5
MOST_GROUPS = 16
"""Multiple of the groups that fill the engine: most rollouts may wait for tools."""


@dataclass(slots=True)
class EngineWatch:
    """Looks at an engine and at the admission gate; the lists are since the last `clear`."""

    engine: Engine
    buffer: Buffer
    config: EngineConfig
    poll_s: float = POLL_S
    """Seconds between looks."""
    info: EngineInfo | None = None
    """The newest report of the engine."""
    _shares: list[float] = field(default_factory=list)
    _held_back: list[bool] = field(default_factory=list)

    async def run(self) -> None:
        """Polls the engine until cancelled, and lets more groups run while it has little to do."""
        gate = self.buffer.gate
        concurrency = Concurrency(gate.max_running, MOST_GROUPS * gate.max_running)
        places = self.config.max_running * (len(self.config.urls) or self.config.count or 1)
        while True:
            info = self.info = await self.engine.info()
            self._shares.append(info.busy_share)
            self._held_back.append(self._holds_back)
            most = concurrency.looked(places=places, running=info.running, waiting=info.waiting, groups=gate.running)
            if most != gate.max_running:
                self.buffer.run_at_most(most)
            await asyncio.sleep(self.poll_s)

    @property
    def _holds_back(self) -> bool:
        gate = self.buffer.gate
        return gate.accepted + gate.running >= gate.budget

    @property
    def busy_share(self) -> float:
        """Mean busy share of the engine."""
        return fmean(self._shares or [self.info.busy_share if self.info else 0.0])

    @property
    def held_back_share(self) -> float:
        """Share of the looks at which the gate had no room."""
        return fmean(self._held_back or [self._holds_back])

    @property
    def progress(self) -> Sequence[int]:
        """Numbers that change while the engine computes."""
        return (self.info.tokens_drawn, self.info.tokens_prefilled) if self.info else ()

    def clear(self) -> None:
        """Begins the next step."""
        self._shares, self._held_back = [], []


ENOUGH_TOKENS = 128
"""Tokens of an engine after which it is judged."""
MOST_ROWS = 8
"""Rows of one comparison: a small part of a step's work, however many engines there are."""
ALLOWED_NATS, ALLOWED_TIMES = 0.5, 3.0
"""Bound of an engine's mismatch: so many nats, and so many times the mismatch of the others in the middle.

Every engine's tokens are some updates old, so honest ones differ from the trainer by up to some tenths of a nat.
"""

TrainerLogprobs = Callable[[Sequence[Sequence[int]]], Awaitable[Logprobs]]


@dataclass(slots=True)
class EngineMismatch:
    """Mean |log pi_trainer - log pi_engine| of the engines of a pool, on tokens that they sampled lately."""

    pool: EnginePool
    _differences: dict[str, list[float]] = field(default_factory=dict)
    """Nats of each token since an engine was last judged."""
    _judged: dict[str, float] = field(default_factory=dict)
    """Mismatch of each engine when it was last judged, in nats."""

    async def compare(self, trainer_logprobs: TrainerLogprobs, temperature: float) -> None:
        """Compares rows sampled at a temperature, and has an engine rest whose mismatch departs from the others'.

        A pool of one engine compares nothing.
        """
        names = {replica.name for replica in self.pool.replicas}
        self._differences = {name: self._differences.get(name, []) for name in names}
        self._judged = {name: nats for name, nats in self._judged.items() if name in names}
        if len(names) < 2:
            return
        for name, each in (await differences(self.pool, trainer_logprobs, temperature, MOST_ROWS)).items():
            self._differences.setdefault(name, []).extend(each)
        due = {name: fmean(each) for name, each in self._differences.items() if len(each) >= ENOUGH_TOKENS}
        self._judged |= due
        for name, nats in due.items():
            others = [judged for other, judged in self._judged.items() if other != name]
            if not others:
                continue
            self._differences[name] = []
            bound = ALLOWED_NATS + ALLOWED_TIMES * median(others)
            why = f"its logprobs differ from the trainer's by {nats:.2g} nats per token, expected at most {bound:.2g}"
            self.pool.judge(name, f"{why} by those of the others" if nats > bound else "")


async def differences(
    pool: EnginePool, trainer_logprobs: TrainerLogprobs, temperature: float, most: int
) -> dict[str, list[float]]:
    """Nats between engine and trainer for each token of at most so many newest rows, by engine.

    The engine with the fewest compared rows comes first. Rows of another temperature are passed over.
    """
    rows: list[tuple[str, SampledRow]] = []
    for replica in sorted(pool.replicas, key=lambda one: one.compared):
        fitting = [row for row in replica.sampled if row.temperature == temperature]
        replica.sampled.clear()
        taken = list(islice(reversed(fitting), max(1, most // len(pool.replicas))))[: most - len(rows)]
        replica.compared += len(taken)
        rows += [(replica.name, row) for row in taken]
    found: dict[str, list[float]] = {}
    if rows:
        computed = await trainer_logprobs([row.token_ids for _, row in rows])
        for (name, row), logprobs in zip(rows, computed, strict=True):
            pairs = zip(logprobs[-len(row.logprobs) :], row.logprobs, strict=True)
            found.setdefault(name, []).extend(abs(ours - theirs) for ours, theirs in pairs)
    return found
