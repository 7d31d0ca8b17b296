"""Watches the engine's load, for the metrics of a step and for the number of groups at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from shoal.config import EngineConfig
from shoal.experience.buffer import Buffer
from shoal.interfaces import Engine, EngineInfo
from shoal.rollout.concurrency import Concurrency

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
