"""Pool of engines behind the Protocol of one engine.

    request      goes to the replica that its session prefers (routing.py); when it fails, to the next
    aborted      an aborted answer continues elsewhere: the pool sends prompt and sampled tokens, never to a
                 replica with older weights than its last token; the same holds for later calls of its session
    new weights  are loaded replica by replica, so generation never stops as a whole
    wrong        an answer is checked whole (answers.py); a wrong one is a failure of its replica, which rests
    named        a request may name another model than the newest Version (named_models.py)

A request fails only when no replica could take it for `patience_s`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from shoal.engine.pool.answers import AskedTokens, check_completions, check_info, check_scores
from shoal.engine.pool.members import LONGEST_BACKOFF_S, PoolMembers, pulled
from shoal.engine.pool.replica import FAILURES_IN_A_ROW, NamedModel, Replica, ReplicaState, SampledRow, within
from shoal.engine.pool.routing import chosen, oldest_served, session_key, summed, waves
from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import EngineError, EngineUnavailable, RequestRefused, WrongAnswer
from shoal.interfaces import EngineInfo
from shoal.types import Completion, FinishReason, Sampling

BACKOFF_S = 0.05
FRUITLESS_ABORTS = 8  # in a row, without a token: a client really does not want this answer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Request that continues where an engine aborted it."""

    key: bytes
    prompt_ids: Sequence[int]
    sampling: Sampling
    priority: int
    at_least: int
    """Version of the newest token of its session."""
    model: NamedModel | None = None
    """Model that answers; None for the newest Version."""


class EnginePool(PoolMembers):
    """Implements `interfaces.Engine` with the replicas that joined. `watch` must run in the background."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica."""
        return len(self._waiting)

    def serves(self, model: NamedModel) -> bool:
        """Whether a replica has the weights of a named model, which may have an adapter on them."""
        return any(replica.whole == model.whole for replica in self._replicas.values())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        n: int = 1,
        priority: int = 0,
        session: str = "",
        model: NamedModel | None = None,
    ) -> list[Completion]:
        """Samples `n` completions of one prompt; calls of one `session` (or else prompt) prefer one replica.

        No token of a session is sampled under an older Version than its calls that ended before this call began.
        """
        key = session_key(session, prompt_ids)
        request = PoolRequest(key, prompt_ids, sampling, priority, self._newest.get(key, 0), model)
        begun = await self._ask_any(key, n, request.at_least, self._generation(request, sampling, n), model)
        whole = await self._all_whole(request, begun)
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

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, model: NamedModel | None = None
    ) -> ScoreResponse:
        """Logprobs of a row as `PoolEngine` has them, by a named model if one is given."""

        async def ask(replica: Replica) -> ScoreResponse:
            answer = await replica.with_model(
                model, lambda adapter, _: replica.engine.scored(token_ids, others, adapter=adapter)
            )
            check_scores(answer.logprobs, len(token_ids))
            return answer

        return await self._ask_any(session_key("", token_ids), 1, 0, ask, model)

    async def update_weights(self, version: int, path: Path) -> None:
        """Loads the weights into one replica after another; returns when all that answer serve them, and one does.

        Raises `RequestRefused` when every replica refuses them, and `EngineUnavailable` when none answers within the
        patience.
        """
        async with self._loader.turn:
            self._loader.aim(version, path)
            refusals: list[RequestRefused] = []
            ready = [replica for replica in self._replicas.values() if replica.state is ReplicaState.READY]
            async with pulled(version, [replica.engine for replica in ready]):
                for wave in waves([replica.name for replica in ready], self._at_once):
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
        deadline_s = self._now_s() + self._patience_s
        while not any(m.state is ReplicaState.READY and m.version >= version for m in self._replicas.values()):
            await self._wait(deadline_s)

    async def info(self) -> EngineInfo:
        """Sums over all replicas that answer, and the oldest version."""
        deadline_s = self._now_s() + self._patience_s
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
                raise WrongAnswer(f"version: expected at least {served}, which it has loaded, got {info.version}")
        except EngineError as error:
            self._lose(replica, error)
            return None
        return info

    def _generation(
        self, request: PoolRequest, sampling: Sampling, n: int, sampled_ids: tuple[int, ...] = ()
    ) -> Callable[[Replica], Awaitable[list[Completion]]]:
        """Call of one replica, which continues the tokens sampled so far; its answer is checked."""
        context = [*request.prompt_ids, *sampled_ids]

        async def ask(replica: Replica) -> list[Completion]:
            async def sampled(adapter: str, oldest: int) -> list[Completion]:
                asked = AskedTokens(len(context), sampling, n, oldest, replica.max_model_len, replica.foreign)
                answer = await replica.engine.generate(
                    context, sampling, n=n, priority=request.priority, adapter=adapter
                )
                check_completions(answer, asked, self._rules)
                if request.model is None and sampling.is_plain:
                    replica.sampled.extend(
                        SampledRow((*context, *one.token_ids), one.logprobs, sampling.temperature)
                        for one in answer
                        if one.token_ids
                    )
                return answer

            answer = await replica.with_model(request.model, sampled)
            if request.model is None:
                return answer
            # Each engine has its own numbers for a named model; versions of a completion must not decrease.
            return [replace(one, versions=(0,) * len(one.versions)) for one in answer]

        return ask

    async def _whole(self, request: PoolRequest, index: int, sampled: Completion) -> Completion:
        """Continues the completion `sampled` for as long as it is aborted."""
        fruitless = 0
        while sampled.finish_reason is FinishReason.ABORT and fruitless < FRUITLESS_ABORTS:
            rest = request.sampling.rest(len(sampled.token_ids), index)
            if rest is None:
                return replace(sampled, finish_reason=FinishReason.LENGTH)
            at_least = sampled.versions[-1] if sampled.versions and request.model is None else request.at_least
            ask = self._generation(request, rest, 1, sampled.token_ids)
            (more,) = await self._ask_any(request.key, 1, at_least, ask, request.model)
            if not more.token_ids:
                await asyncio.sleep(_backoff_s(fruitless))
            fruitless = 0 if more.token_ids else fruitless + 1
            sampled = sampled.then(more)
        return sampled

    async def _ask_any(
        self,
        key: bytes,
        count: int,
        at_least: int,
        ask: Callable[[Replica], Awaitable[T]],
        model: NamedModel | None = None,
    ) -> T:
        """Answer of the first replica that gives one.

        A refused request is asked of one other replica. Raises `RequestRefused`, or `EngineUnavailable` at the
        deadline.
        """
        asked_s = self._now_s()
        deadline_s = asked_s + self._patience_s
        failed: set[str] = set()
        rounds, refused = 0, list[tuple[Replica, RequestRefused]]()
        while True:
            replica = chosen(key, self._serving(model), count=count, at_least=at_least, avoid=failed)
            if replica is None and refused:
                raise refused[0][1]
            if model is not None and replica is None and (idle := self._idle(model)) is not None:
                await self._take_over(idle, model)
                continue
            if model is not None and replica is not None and self._is_turn_over(model, asked_s):
                replica = None
            if replica is None and failed:  # every possible replica has failed once: try them again after a pause
                failed.clear()
                await asyncio.sleep(min(self._left_s(deadline_s), _backoff_s(rounds)))
                rounds += 1
            elif replica is None:
                waiting = asked_s, "" if model is None else model.whole
                self._waiting.append(waiting)
                try:
                    await self._wait(deadline_s)
                finally:
                    self._waiting.remove(waiting)
            else:
                failed.add(replica.name)
                try:
                    answer = await self._ask_replica(replica, count, ask)
                except RequestRefused as error:
                    if refused:  # twice: the request is wrong, and no replica
                        raise
                    refused.append((replica, error))
                except EngineError as error:
                    self._failed(replica, error)
                else:
                    for refusing, refusal in refused:
                        self._failed(refusing, refusal)
                    return answer

    def _serving(self, model: NamedModel | None) -> Collection[Replica]:
        """Replicas with the weights that a request needs."""
        every = self._replicas.values()
        return every if model is None else [replica for replica in every if replica.whole == model.whole]

    def _idle(self, model: NamedModel) -> Replica | None:
        """Replica with other weights than a request needs, and without requests; the one that was asked longest ago."""
        others = (one for one in self._replicas.values() if one.whole != model.whole and not one.load)
        ready = (one for one in others if one.state is ReplicaState.READY)
        return min(ready, key=lambda replica: replica.used_s, default=None)

    def _is_turn_over(self, model: NamedModel, asked_s: float) -> bool:
        """Whether a request must wait because an older one for other weights has waited for a turn."""
        oldest_s = min((since_s for since_s, whole in self._waiting if whole != model.whole), default=asked_s)
        return oldest_s < asked_s and self._now_s() - oldest_s > self._turn_s

    async def _take_over(self, replica: Replica, model: NamedModel) -> None:
        """Loads a whole model into an idle replica. Raises `RequestRefused`."""
        try:
            await self._loader.take_over(replica, model)
        except EngineUnavailable as error:
            self._lose(replica, error)
        finally:
            self._notify()

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
        replica.used_s = self._now_s()
        call = asyncio.timeout(None)
        try:
            async with call:
                replica.calls[call] = None
                answer = await ask(replica)
            replica.answered()
            return answer
        except TimeoutError:
            raise EngineUnavailable(replica.last_error) from None
        finally:
            replica.calls.pop(call, None)
            replica.load -= count
            if replica.name not in self._replicas or (self._waiting and not replica.load):
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
            if replica.state is ReplicaState.UPDATING:  # not one that was set to rest meanwhile
                replica.state = ReplicaState.READY
                self._notify()
        finally:
            replica.loading = None


def _backoff_s(rounds: int) -> float:
    return min(BACKOFF_S * 2.0**rounds, LONGEST_BACKOFF_S)
