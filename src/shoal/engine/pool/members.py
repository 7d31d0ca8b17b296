"""Replicas of a pool: they join, leave, fall silent and return.

A replica that does not answer is away: it gets no requests, and no request or update of another replica waits for it.
When it answers again it first loads the newest weights.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from shoal.engine.pool.answers import MOST_INTEGER, AnswerRules
from shoal.engine.pool.loading import Loader
from shoal.engine.pool.named_models import TURN_S, NumberedWeights
from shoal.engine.pool.replica import PoolEngine, Replica, ReplicaState, within
from shoal.engine.pool.routing import WAVE_SHARE
from shoal.errors import EngineError, EngineUnavailable, WrongAnswer

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
