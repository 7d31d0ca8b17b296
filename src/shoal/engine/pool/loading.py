"""Loading of the newest weights into the engines of a pool, and the check that they compute with them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from shoal.engine.pool.answers import AnswerRules, check_info, check_scores
from shoal.engine.pool.canary import canary_of
from shoal.engine.pool.named_models import NamedModel, NumberedWeights
from shoal.engine.pool.replica import PoolEngine, Replica, ReplicaAdapters, ReplicaState, within
from shoal.errors import EngineError, EngineUnavailable, RequestRefused, WrongAnswer

UPDATE_TIMEOUT_S = 900.0


@runtime_checkable
class PullsVersions(Protocol):
    """Engine whose host fetches a Version before the engine loads it."""

    async def pull(self, version: int) -> None:
        """Returns once the host has the Version's files. Raises `EngineError`."""


@asynccontextmanager
async def pulled(version: int, engines: Iterable[object]) -> AsyncIterator[None]:
    """Has all hosts fetch a Version from now on, so that none does so in its turn to load.

    A failure is no news yet: the load fetches again.
    """

    async def pull(engine: PullsVersions) -> None:
        with suppress(EngineError):
            await engine.pull(version)

    pulling = [asyncio.create_task(pull(engine)) for engine in engines if isinstance(engine, PullsVersions)]
    try:
        yield
    finally:
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Target:
    """Weights that all engines should serve."""

    version: int
    path: Path


@dataclass(slots=True)
class Loader:
    """Weights that all engines of a pool should serve, and the way there."""

    rules: AnswerRules
    check_every_s: float
    check_timeout_s: float
    recovered: int = 0
    """Version that engines may serve before the first target."""
    numbers: NumberedWeights | None = None
    """Numbers of named models, if the pool serves any."""
    target: Target | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held to change which weights the replicas that take requests serve."""

    def aim(self, version: int, path: Path) -> None:
        """Sets the target; no token of a newer Version is taken."""
        self.target = Target(version, path)
        self.rules.newest = max(version, self.recovered)

    async def bring_up(self, replica: Replica) -> None:
        """Loads the newest weights into an engine that takes no requests.

        The engine may hang, so no update waits for the first load. If newer weights have come by its end, the next
        update waits for a second load: a slow engine would otherwise never catch up. Raises `EngineUnavailable` for
        weights of another run, and `WrongAnswer` when the canary fails.
        """
        info = await within(replica.engine.info(), self.check_timeout_s)  # the engine may have restarted
        check_info(info)
        version, replica.max_model_len, replica.foreign = info.version, info.max_model_len, info.foreign
        if self.numbers is not None:
            replica.adapters = ReplicaAdapters(replica.engine, self.numbers)
            replica.version, replica.whole = version, None if version else ""
            return
        newest = self.rules.newest if self.target else version
        if version > newest:
            raise EngineUnavailable(
                f"expected an engine that serves version {newest} of this run or an older one, got version {version}: "
                f"its weights are another run's; start it again"
            )
        if target := self._newer(version):
            try:
                version = await self.loaded(replica.engine, target)
            except RequestRefused:
                if self.target is target:
                    raise
                # Refused weights may be gone: files are removed once newer weights are served.
        if self._newer(version):
            async with self.turn:
                if target := self._newer(version):
                    version = await self.loaded(replica.engine, target)
        replica.version = version

    async def loaded(self, engine: PoolEngine, target: Target) -> int:
        """Version that an engine serves once it has loaded the target and computes with it."""
        await _load(engine, target, self.check_every_s, self.check_timeout_s)
        await _check_canary(engine, target, self.check_timeout_s)
        return target.version

    async def take_over(self, replica: Replica, model: NamedModel) -> None:
        """Loads a whole model into a replica without requests. Raises `EngineError`; its weights are then unknown."""
        assert self.numbers is not None
        assert self.target is not None
        path = model.folder if model.whole and model.folder else self.target.path
        replica.state, replica.whole = ReplicaState.UPDATING, None
        try:
            with self.numbers.number(path) as number:
                replica.version = await self.loaded(replica.engine, Target(number, path))
            replica.whole = model.whole
        finally:
            if replica.state is ReplicaState.UPDATING:
                replica.state = ReplicaState.READY

    def _newer(self, version: int) -> Target | None:
        """Newer weights that an engine at `version` must load, if any."""
        return self.target if self.target and self.target.version > version else None


async def _load(engine: PoolEngine, target: Target, check_every_s: float, check_timeout_s: float) -> None:
    """Has an engine load the target.

    Raises `EngineUnavailable` after `UPDATE_TIMEOUT_S`, and for an engine that does not answer meanwhile.
    """
    loading = asyncio.ensure_future(engine.update_weights(target.version, target.path))
    try:
        async with asyncio.timeout(UPDATE_TIMEOUT_S):
            while not loading.done():
                await asyncio.wait({loading}, timeout=check_every_s)
                if not loading.done():
                    await within(engine.alive(), check_timeout_s)
            loading.result()
    except TimeoutError:
        raise EngineUnavailable(f"version {target.version} was not loaded in {UPDATE_TIMEOUT_S:g} s") from None
    finally:
        loading.cancel()


async def _check_canary(engine: PoolEngine, target: Target, timeout_s: float) -> None:
    """Raises `WrongAnswer` for an engine that computes with other weights than the target's."""
    known = await asyncio.to_thread(canary_of, target.path)
    if known is None:
        return
    logprobs = (await within(engine.scored(known.token_ids), timeout_s)).logprobs
    check_scores(logprobs, len(known.token_ids))
    if off_nats := known.off_nats(logprobs):
        raise WrongAnswer(f"it took version {target.version} but computes with other weights: {off_nats}")
