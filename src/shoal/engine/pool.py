"""Pool of engines behind the Protocol of one engine.

    request      goes to the replica that its session prefers (pool_routing.py); when it fails, to the next
    aborted      an aborted answer continues elsewhere: the pool sends prompt and sampled tokens, never to a
                 replica with older weights than its last token; the same holds for later calls of its session
    new weights  are loaded replica by replica, so generation never stops as a whole
    away         a replica that does not answer gets no requests; when it answers again it first loads the newest
                 weights, and no request or update of another replica waits for it
    wrong        an answer is checked whole (answers.py); a wrong one is a failure of its replica, which rests

Replicas may join and leave at any time. A request fails only when no replica could take it for `patience_s`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from shoal.engine.answers import AnswerRules, WrongAnswer, check_info, check_scores
from shoal.engine.pool_loading import Loader
from shoal.engine.pool_routing import chosen, oldest_served, session_key, summed, waves
from shoal.engine.replica import (
    FAILURES_IN_A_ROW,
    PoolEngine,
    PoolRequest,
    Replica,
    ReplicaState,
    within,
)
from shoal.errors import EngineError, EngineUnavailable, RequestRefused
from shoal.interfaces import EngineInfo
from shoal.types import Completion, FinishReason, Sampling

PATIENCE_S = 600.0  # of a request: longer than the start of a large model takes
CHECK_EVERY_S = 1.0
CHECK_TIMEOUT_S = 30.0
ABORT_TIMEOUT_S = 5.0
BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
FRUITLESS_ABORTS = 8  # in a row, without a token: a client really does not want this answer

T = TypeVar("T")


class EnginePool:
    """Implements `interfaces.Engine` with the replicas that joined. `watch` must run in the background."""

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
    ) -> None:
        """`patience_s` bounds a request's wait for a replica that can take it; `initial` has the weights of version 0.

        A replica that does not report its state within `check_timeout_s` counts as away. Replicas may serve versions up
        to `recovered` before `update_weights` gives them any. `on_event` gets a sentence for each wrong answer.
        """
        self._rules, self._on_event = rules or AnswerRules(), on_event
        self._patience_s = patience_s
        self._check_every_s, self._check_timeout_s = check_every_s, check_timeout_s
        self._loader = Loader(self._rules, check_every_s, check_timeout_s, recovered)
        if initial:
            self._loader.aim(0, initial)
        self._replicas: dict[str, Replica] = {}
        self._newest: dict[bytes, int] = {}  # Version of the newest token of each session that not all may continue
        self._changed = asyncio.Event()
        self._suspected = asyncio.Event()  # a request failed: the replicas are checked at once
        self._last_error = "none has joined"
        self._closed = False

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
                deadline_s = time.monotonic() + self._check_timeout_s
                while replica.load and time.monotonic() < deadline_s:
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

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        """Samples `n` completions of one prompt; calls of one `session` (or else prompt) prefer one replica.

        No token of a session is sampled under an older Version than its calls that ended before this call began.
        """
        key = session_key(session, prompt_ids)
        request = PoolRequest(key, prompt_ids, sampling, priority, self._newest.get(key, 0))
        whole = await self._all_whole(
            request, await self._ask_any(key, n, request.at_least, request.generation(sampling, n, self._rules))
        )
        if session:
            newest = max((completion.versions[-1] for completion in whole if completion.versions), default=0)
            if newest > self._oldest_served:
                self._newest[key] = max(newest, self._newest.get(key, 0))
        return whole

    async def _all_whole(self, request: PoolRequest, begun: list[Completion]) -> list[Completion]:
        """Continues each completion to its end."""
        if all(completion.finish_reason is not FinishReason.ABORT for completion in begun):
            return begun
        rest = (self._whole(request, index, sampled) for index, sampled in enumerate(begun))
        whole = []
        for ended in await asyncio.gather(*rest, return_exceptions=True):  # all have ended before one error is raised
            if isinstance(ended, BaseException):
                raise ended
            whole.append(ended)
        return whole

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs in nats at temperature 1 of tokens 1..L-1 given those before them."""

        async def ask(replica: Replica) -> list[float]:
            logprobs = await replica.engine.score(token_ids)
            check_scores(logprobs, len(token_ids))
            return logprobs

        return await self._ask_any(session_key("", token_ids), 1, 0, ask)

    async def update_weights(self, version: int, path: Path) -> None:
        """Loads the weights into one replica after another; returns when all that answer serve them, and one does.

        Raises `RequestRefused` when every replica refuses them, and `EngineUnavailable` when none answers within the
        patience.
        """
        async with self._loader.turn:
            self._loader.aim(version, path)
            refusals: list[RequestRefused] = []
            for wave in waves([m.name for m in self._replicas.values() if m.state is ReplicaState.READY]):
                async with asyncio.TaskGroup() as loading:
                    for name in wave:
                        if name in self._replicas:
                            loading.create_task(self._load(self._replicas[name], refusals), name=f"loading {name}")
            if refusals and not any(replica.version >= version for replica in self._replicas.values()):
                for replica in self._replicas.values():  # refusing replicas still serve their old weights
                    replica.state = ReplicaState.READY if replica.state is ReplicaState.UPDATING else replica.state
                raise refusals[0]
            for replica in self._replicas.values():
                if replica.state is ReplicaState.UPDATING:
                    self._lose(replica, refusals[0])
            oldest = self._oldest_served
            self._newest = {key: newest for key, newest in self._newest.items() if newest > oldest}
        deadline_s = time.monotonic() + self._patience_s
        while not any(m.state is ReplicaState.READY and m.version >= version for m in self._replicas.values()):
            await self._wait(deadline_s)

    async def info(self) -> EngineInfo:
        """Sums over all replicas that answer, and the oldest version."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            replicas = [replica for replica in self._replicas.values() if replica.state is not ReplicaState.AWAY]
            infos = [info for info in await asyncio.gather(*map(self._info, replicas)) if info is not None]
            if infos:
                return summed(infos)
            await self._wait(deadline_s)

    @property
    def _oldest_served(self) -> int:
        return oldest_served(self.replicas, self._loader.target.version if self._loader.target else 0)

    async def _info(self, replica: Replica) -> EngineInfo | None:
        served = replica.version  # before the question: an update may end while it is under way
        try:
            info = await within(replica.engine.info(), self._check_timeout_s)
            check_info(info, self._rules.newest)
            if info.version < served:
                raise EngineUnavailable(f"{replica.name} lost version {served}: it started anew, or got other weights")
        except EngineError as error:
            self._lose(replica, error)
            return None
        return info

    async def _whole(self, request: PoolRequest, index: int, sampled: Completion) -> Completion:
        """Continues the completion `sampled` for as long as it is aborted."""
        fruitless = 0
        while sampled.finish_reason is FinishReason.ABORT and fruitless < FRUITLESS_ABORTS:
            rest = request.sampling.rest(len(sampled.token_ids), index)
            if rest is None:
                return replace(sampled, finish_reason=FinishReason.LENGTH)
            at_least = sampled.versions[-1] if sampled.versions else request.at_least
            asked = request.generation(rest, 1, self._rules, sampled.token_ids)
            (more,) = await self._ask_any(request.key, 1, at_least, asked)
            if not more.token_ids:
                await asyncio.sleep(_backoff_s(fruitless))
            fruitless = 0 if more.token_ids else fruitless + 1
            sampled = sampled.then(more)
        return sampled

    async def _ask_any(self, key: bytes, count: int, at_least: int, ask: Callable[[Replica], Awaitable[T]]) -> T:
        """Answer of the first replica that gives one.

        A refused request is asked of one other replica. Raises `RequestRefused`, or `EngineUnavailable` at the
        deadline.
        """
        deadline_s = time.monotonic() + self._patience_s
        failed: set[str] = set()
        rounds, refusal = 0, None
        while True:
            replica = chosen(key, self.replicas, count=count, at_least=at_least, avoid=failed)
            if replica is None and refusal is not None:
                raise refusal
            if replica is None and failed:  # every possible replica has failed once: try them again after a pause
                failed.clear()
                await asyncio.sleep(min(self._left_s(deadline_s), _backoff_s(rounds)))
                rounds += 1
            elif replica is None:
                await self._wait(deadline_s)
            else:
                failed.add(replica.name)
                try:
                    return await self._ask_replica(replica, count, ask)
                except EngineError as error:
                    if refusal is not None and isinstance(error, RequestRefused):
                        raise
                    refusal = error if isinstance(error, RequestRefused) else refusal
                    self._failed(replica, error)

    def _failed(self, replica: Replica, error: EngineError) -> None:
        """Notes a failed request. A replica that fails many in a row rests, if there is another one."""
        replica.last_error = self._last_error = str(error)
        replica.failures += 1
        others = (one for one in self._replicas.values() if one is not replica)
        if isinstance(error, WrongAnswer):
            self._lose(replica, error)
        elif replica.failures >= FAILURES_IN_A_ROW and any(one.state is not ReplicaState.AWAY for one in others):
            replica.rest()
            self._lose(replica, error)
        else:
            self._suspected.set()  # and on to the next: checking a replica that hangs takes long

    async def _ask_replica(self, replica: Replica, count: int, ask: Callable[[Replica], Awaitable[T]]) -> T:
        """Answer of one replica. Raises `EngineUnavailable` also when the replica is lost meanwhile."""
        replica.load += count
        call = asyncio.timeout(None)
        try:
            async with call:
                replica.calls.add(call)
                answer = await ask(replica)
            replica.answered()
            return answer
        except TimeoutError:
            raise EngineUnavailable(replica.last_error) from None
        finally:
            replica.calls.discard(call)
            replica.load -= count
            if replica.name not in self._replicas:
                self._notify()

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

    async def _load(self, replica: Replica, refusals: list[RequestRefused]) -> None:
        """Loads the target into one replica, which stays `UPDATING` when it refuses."""
        assert self._loader.target is not None
        if replica.state is not ReplicaState.READY:  # lost meanwhile: it loads the target when it returns
            return
        replica.state, replica.loading = ReplicaState.UPDATING, asyncio.current_task()
        try:
            replica.version = await self._loader.loaded(replica.engine, self._loader.target)
        except RequestRefused as error:
            refusals.append(error)
        except EngineUnavailable as error:
            self._lose(replica, error)
        else:
            replica.state = ReplicaState.READY
            self._notify()
        finally:
            replica.loading = None

    def _lose(self, replica: Replica, error: EngineError) -> None:
        """Marks a replica as away and returns its requests to the pool: it may hang and never answer them."""
        replica.state, replica.last_error = ReplicaState.AWAY, str(error)
        self._last_error = str(error)
        if isinstance(error, WrongAnswer) and not replica.resting:  # answers that are wrong together count once
            replica.answered_wrongly()
            self._last_error = f"{replica.name} gave a wrong answer: {error}"
            self._on_event(f"{self._last_error}; {'it is left out' if replica.left_out else 'it rests'}")
        replica.return_calls()

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

    def _left_s(self, deadline_s: float) -> float:
        """Seconds before the deadline. Raises `EngineUnavailable` when none are left."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineUnavailable(f"no engine for {self._patience_s:g} s; the last error: {self._last_error}")
        return left_s


def _backoff_s(rounds: int) -> float:
    return min(BACKOFF_S * 2.0**rounds, LONGEST_BACKOFF_S)
