"""An engine of the pool: what it must be able to do, what is known of it, and how it is given weights."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.engine.pool_routing import ReplicaHandle, ReplicaState
from shoal.errors import EngineUnavailable
from shoal.interfaces import Engine

UPDATE_TIMEOUT_S = 900.0


class PoolEngine(Engine, Protocol):
    """What an engine must be able to do to be one of many."""

    async def alive(self) -> None:
        """Returns when the engine answers. Raises `EngineUnavailable` otherwise."""
        ...

    async def abort(self, request_ids: Sequence[str] = ()) -> None:
        """Ends all requests with what was drawn."""
        ...

    async def aclose(self) -> None:
        """Closes the connections."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    """An engine of the pool. Invariant: `version` is not above what the engine serves."""

    name: str
    engine: PoolEngine
    version: int
    state: ReplicaState = ReplicaState.READY
    load: int = 0
    last_error: str = ""
    updating: bool = False
    """Whether an update has it load weights now, which it may do though it was lost meanwhile."""
    watch: asyncio.Task[None] | None = None
    """The last look at it; an engine that hangs keeps it from ending."""
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """Of requests under way; expiring one gives its request back to the pool."""

    @property
    def seat(self) -> ReplicaHandle:
        """The engine as a request sees it."""
        return ReplicaHandle(self.name, self.state, self.version, self.load)


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that all engines should serve."""

    version: int
    path: Path


async def loaded(engine: PoolEngine, target: Target) -> int:
    """Has an engine serve the target; its version. Raises `EngineUnavailable` when that takes too long."""
    try:
        async with asyncio.timeout(UPDATE_TIMEOUT_S):
            await engine.update_weights(target.version, target.path)
    except TimeoutError:
        raise EngineUnavailable(f"version {target.version} was not loaded in {UPDATE_TIMEOUT_S:g} s") from None
    return target.version
