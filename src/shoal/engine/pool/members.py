"""Replicas of a pool join, leave, fall silent and return; they load the newest weights and are checked.

A replica that does not answer is away: it gets no requests, and no request or update of another replica waits for it.
When it answers again it first loads the newest weights.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from shoal.engine.pool.answers import MOST_INTEGER, AnswerRules, check_info, check_scores
from shoal.engine.pool.canary import canary_of
from shoal.engine.pool.replica import (
    TURN_S,
    NamedModel,
    NumberedWeights,
    PoolEngine,
    Replica,
    ReplicaAdapters,
    ReplicaState,
    within,
)
from shoal.engine.pool.routing import WAVE_SHARE
from shoal.errors import EngineError, EngineUnavailable, RequestRefused, WrongAnswer

UPDATE_TIMEOUT_S = 900.0
UNLOADED = -1
"""Version of an engine that must load the target."""

T = TypeVar("T")


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
        if self.target and self.target.version == version:
            try:
                await _check_canary(replica.engine, self.target, self.check_every_s, self.check_timeout_s)
            except WrongAnswer:  # the number of the target, and other weights: another run's, or a failed load's
                version = UNLOADED
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
        await _check_canary(engine, target, self.check_every_s, self.check_timeout_s)
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
    """Has an engine load the target. Raises as `_while_alive` does."""
    loading = engine.update_weights(target.version, target.path)
    await _while_alive(engine, loading, f"version {target.version} was not loaded", check_every_s, check_timeout_s)


async def _while_alive(
    engine: PoolEngine, answer: Awaitable[T], failure: str, check_every_s: float, check_timeout_s: float
) -> T:
    """Answer that a busy engine may give late.

    Raises `EngineUnavailable` after `UPDATE_TIMEOUT_S`, and for an engine that does not answer meanwhile.
    """
    answering = asyncio.ensure_future(answer)
    try:
        async with asyncio.timeout(UPDATE_TIMEOUT_S):
            while not answering.done():
                await asyncio.wait({answering}, timeout=check_every_s)
                if not answering.done():
                    await within(engine.alive(), check_timeout_s)
            return answering.result()
    except TimeoutError:
        raise EngineUnavailable(f"{failure} in {UPDATE_TIMEOUT_S:g} s") from None
    finally:
        answering.cancel()


async def _check_canary(engine: PoolEngine, target: Target, check_every_s: float, check_timeout_s: float) -> None:
    """Raises `WrongAnswer` for an engine that computes with other weights than the target's.

    A full engine scores the row after the answers before it, which may take longer than `check_timeout_s`.
    """
    known = await asyncio.to_thread(canary_of, target.path)
    if known is None:
        return
    scoring, failure = engine.scored(known.token_ids), "the canary was not scored"
    logprobs = (await _while_alive(engine, scoring, failure, check_every_s, check_timeout_s)).logprobs
    check_scores(logprobs, len(known.token_ids))
    if off_nats := known.off_nats(logprobs):
        raise WrongAnswer(f"it took version {target.version} but computes with other weights: {off_nats}")


PATIENCE_S = 600.0  # of a request: longer than the start of a large model takes
CHECK_EVERY_S = 1.0
CHECK_TIMEOUT_S = 30.0
ABORT_TIMEOUT_S = 5.0
LONGEST_BACKOFF_S = 2.0


class PoolMembers:
    """Replicas of a pool with their states. `watch` must run in the background."""

    def __init__(
        self,
        *,
        patience_s: float = PATIENCE_S,
        check_every_s: float = CHECK_EVERY_S,
        check_timeout_s: float = CHECK_TIMEOUT_S,
        initial: Path | None = None,
        recovered: int = 0,
        rules: AnswerRules | None = None,
        on_event: Callable[[str], None] = lambda what: None,
        numbers: NumberedWeights | None = None,
        turn_s: float = TURN_S,
        at_once: float = WAVE_SHARE,
    ) -> None:
        """`patience_s` bounds a request's wait for a replica that can take it; `initial` has the weights of version 0.

        A replica that does not report its state within `check_timeout_s` counts as away. Replicas may serve versions up
        to `recovered` before `update_weights` gives them any. `on_event` gets a sentence for each wrong answer. With
        `numbers` the pool serves named models on the `initial` weights instead of Versions; a request for other weights
        waits `turn_s` before later requests wait for it. A share `at_once` of the replicas loads weights together.
        """
        self._rules, self._on_event, self._at_once = rules or AnswerRules(), on_event, at_once
        self._patience_s, self._turn_s = patience_s, turn_s
        self._check_every_s, self._check_timeout_s = check_every_s, check_timeout_s
        self._loader = Loader(
            self._rules, check_every_s, check_timeout_s, recovered if numbers is None else MOST_INTEGER, numbers
        )
        if initial:
            self._loader.aim(0, initial)
        self._replicas: dict[str, Replica] = {}
        self._newest: dict[bytes, int] = {}  # Version of the newest token of each session that not all may continue
        self._changed = asyncio.Event()
        self._suspected = asyncio.Event()  # a request failed: the replicas are checked at once
        self._last_error = "none has joined"
        self._closed = False
        self._waiting: list[tuple[float, str]] = []  # when each request that waits came, and its whole model

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Replicas in order of joining."""
        return tuple(self._replicas.values())

    async def join(self, name: str, engine: PoolEngine) -> None:
        """Adds a replica once it serves the newest weights. Raises `EngineError` when it cannot."""
        assert name not in self._replicas, f"an engine named {name} is there already"
        replica = Replica(name, engine, 0)
        try:
            await self._loader.bring_up(replica)
            if self._closed:
                raise EngineUnavailable("the pool has been closed")
        except BaseException:
            await engine.aclose()
            raise
        self._replicas[name] = replica  # no await since the load: no update missed it
        self._notify()

    async def leave(self, name: str) -> None:
        """Removes a replica, if present; its answers are aborted and continue elsewhere."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        for waiting in (replica.watch, replica.loading):
            if waiting is not None:
                waiting.cancel()
        self._last_error = replica.last_error or f"{name} has left"
        self._notify()
        try:
            with contextlib.suppress(EngineError):
                await within(replica.engine.abort(), min(ABORT_TIMEOUT_S, self._check_timeout_s))
                deadline_s = self._now_s() + self._check_timeout_s
                while replica.load and self._now_s() < deadline_s:
                    await self._change(1.0)
        finally:  # a run that ends meanwhile has removed the replica
            replica.return_calls()
            await replica.engine.aclose()

    async def watch(self) -> None:
        """Checks the replicas until cancelled: a silent one is away, and one that answers again is brought up to date.

        Each check is a separate task, so a replica that hangs delays no other.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                for replica in self._replicas.values():
                    if replica.watch is None or replica.watch.done():
                        replica.watch = tasks.create_task(self._check(replica), name=f"checking {replica.name}")
                self._suspected.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._check_every_s):
                        await self._suspected.wait()

    async def aclose(self) -> None:
        """Closes all connections, also of engines that are joining."""
        self._closed = True
        for replica in self._replicas.values():
            await replica.engine.aclose()
        self._replicas.clear()

    async def _check(self, replica: Replica) -> None:
        """Checks whether a replica answers, and brings it up when it answers again."""
        if replica.loading is not None or replica.state is ReplicaState.UPDATING or replica.resting:
            return
        try:
            await within(replica.engine.alive(), self._check_timeout_s)
            if replica.state is not ReplicaState.AWAY or replica.loading is not None:
                return
            await self._loader.bring_up(replica)
        except EngineError as error:
            self._lose(replica, error)
        else:
            replica.state = ReplicaState.READY
            self._notify()

    def _lose(self, replica: Replica, error: EngineError) -> None:
        """Marks a replica as away and returns its requests to the pool: it may hang and never answer them."""
        replica.state, replica.last_error = ReplicaState.AWAY, str(error)
        self._last_error = str(error)
        if isinstance(error, WrongAnswer) and not replica.resting:  # answers that are wrong together count once
            replica.answered_wrongly()
            self._last_error = f"{replica.name} gave a wrong answer: {error}"
            self._on_event(f"{self._last_error}; {'it is left out' if replica.left_out else 'it rests'}")
        replica.return_calls()

    def judge(self, name: str, departs: str) -> None:
        """Has a replica rest whose answers depart from those of the others; an empty reason says that they agree."""
        replica = self._replicas.get(name)
        if replica is None or replica.left_out:
            return
        replica.departures = replica.departures + 1 if departs else 0
        if departs:
            replica.rest()
            self._lose(replica, EngineUnavailable(departs))
            self._on_event(f"{name}: {departs}; {'it is left out' if replica.left_out else 'it rests'}")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout_s: float) -> None:
        """Returns when a replica joined, left or recovered, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _wait(self, deadline_s: float) -> None:
        """Waits for a change. Raises `EngineUnavailable` when none comes before the deadline."""
        await self._change(min(self._left_s(deadline_s), LONGEST_BACKOFF_S))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _left_s(self, deadline_s: float) -> float:
        """Seconds before the deadline. Raises `EngineUnavailable` when none are left."""
        left_s = deadline_s - self._now_s()
        if left_s <= 0:
            raise EngineUnavailable(f"no engine for {self._patience_s:g} s; the last error: {self._last_error}")
        return left_s
