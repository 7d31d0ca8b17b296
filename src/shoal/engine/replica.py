"""Replica: an engine of the pool, its required methods, its known state, its weight updates, and requests to it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from shoal.errors import EngineUnavailable
from shoal.interfaces import Engine
from shoal.types import Sampling

UPDATE_TIMEOUT_S = 900.0


class ReplicaState(StrEnum):
    """States of a replica."""

    READY = "ready"
    """The replica takes requests."""
    UPDATING = "updating"
    """The replica loads weights: its requests continue, and new requests go elsewhere where possible."""
    AWAY = "away"
    """The replica did not answer, or serves the wrong weights."""


class PoolEngine(Engine, Protocol):
    """Protocol that an engine must satisfy to join a pool."""

    async def alive(self) -> None:
        """Returns when the engine answers. Raises `EngineUnavailable` otherwise."""

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens."""

    async def aclose(self) -> None:
        """Closes the connections."""


@dataclass(slots=True, eq=False)
class Replica:
    """Engine of the pool. Invariant: `version` is at most the version that the engine serves."""

    name: str
    engine: PoolEngine
    version: int
    state: ReplicaState = ReplicaState.READY
    load: int = 0
    """Sequences that the pool has running here."""
    last_error: str = ""
    updating: bool = False
    """Whether an update loads weights into the engine now; also possible after the engine was lost."""
    watch: asyncio.Task[None] | None = None
    """Task of the latest check; a hanging engine keeps it from ending."""
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of the requests under way; expiring a timeout returns its request to the pool."""


@dataclass(frozen=True, slots=True)
class Target:
    """Weights that all engines should serve."""

    version: int
    path: Path


async def load_target(engine: PoolEngine, target: Target) -> int:
    """Has an engine load the target; returns its version. Raises `EngineUnavailable` after `UPDATE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(UPDATE_TIMEOUT_S):
            await engine.update_weights(target.version, target.path)
    except TimeoutError:
        raise EngineUnavailable(f"version {target.version} was not loaded in {UPDATE_TIMEOUT_S:g} s") from None
    return target.version


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Request that continues where an engine aborted it."""

    key: bytes
    prompt_ids: Sequence[int]
    sampling: Sampling
    priority: int
    at_least: int
    """Version of the newest token of its session."""
