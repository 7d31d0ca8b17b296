"""Many engines as one, behind the same Protocol.

    request      goes to the engine that its session prefers (placement.py); when that one fails, to the next
    cut off      an answer that an engine aborted goes on elsewhere: prompt and drawn tokens are sent, never to an
                 engine with older weights than its last token
    new weights  are loaded engine by engine, so that generation never stops as a whole
    away         an engine that does not answer gets no requests; when it is back it loads the newest weights first

Engines may join and leave at any time. A request fails only when no engine could take it for `patience_s`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

from shoal.engine import partial
from shoal.engine.placement import Seat, State, chosen, summed, waves
from shoal.errors import EngineError, EngineUnavailable, RequestRefused
from shoal.interfaces import Engine, EngineInfo
from shoal.types import Completion, FinishReason, Sampling

PATIENCE_S = 120.0
CHECK_EVERY_S = 1.0
CHECK_TIMEOUT_S = 30.0
UPDATE_TIMEOUT_S = 900.0
BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
FRUITLESS_ABORTS = 8  # in a row, without a single token: somebody really does not want this answer

T = TypeVar("T")


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
class _Member:
    """An engine of the pool. Invariant: `version` is not above what the engine serves."""

    name: str
    engine: PoolEngine
    version: int
    state: State = State.READY
    load: int = 0
    last_error: str = ""
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """Of requests under way; expiring one gives its request back to the pool."""

    @property
    def seat(self) -> Seat:
        return Seat(self.name, self.state, self.version, self.load)


@dataclass(frozen=True, slots=True)
class _Target:
    """The weights that all engines should serve."""

    version: int
    path: Path


class EnginePool:
    """Implements `interfaces.Engine` with those that joined. `watch` must run beside it."""

    def __init__(
        self,
        *,
        patience_s: float = PATIENCE_S,
        check_every_s: float = CHECK_EVERY_S,
        initial: Path | None = None,
        recovered: int = 0,
    ) -> None:
        """`patience_s` is how long a request may wait for an engine that can take it; `initial` is version 0.

        Engines may serve versions up to `recovered` before `update_weights` gives them any.
        """
        self._patience_s = patience_s
        self._check_every_s = check_every_s
        self._members: dict[str, _Member] = {}
        self._target = _Target(0, initial) if initial else None
        self._recovered = recovered
        self._loading = asyncio.Lock()  # who changes which weights an engine serves
        self._changed = asyncio.Event()
        self._last_error = "none has joined"

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The engines as they are now."""
        return tuple(member.seat for member in self._members.values())

    async def join(self, name: str, engine: PoolEngine) -> None:
        """Takes an engine in once it serves the newest weights. Raises `EngineError` when it cannot."""
        assert name not in self._members, f"an engine named {name} is there already"
        async with self._loading:
            try:
                version = await self._brought_up(engine, (await engine.info()).version)
            except BaseException:
                await engine.aclose()
                raise
            self._members[name] = _Member(name, engine, version)
        self._notify()

    async def leave(self, name: str) -> None:
        """Lets an engine go if it is there; the answers it has are aborted and go on elsewhere from where they are."""
        member = self._members.pop(name, None)
        if member is None:
            return
        self._last_error = member.last_error or f"{name} has left"
        self._notify()
        with contextlib.suppress(EngineError):
            await member.engine.abort()
        deadline_s = time.monotonic() + CHECK_TIMEOUT_S
        while member.load and time.monotonic() < deadline_s:
            await self._change(1.0)
        await member.engine.aclose()

    async def watch(self) -> None:
        """Looks after the engines, for ever: who does not answer is away, and who answers again is brought up."""
        while True:
            async with asyncio.TaskGroup() as checks:
                for member in list(self._members.values()):
                    checks.create_task(self._check(member), name=f"checking {member.name}")
            await asyncio.sleep(self._check_every_s)

    async def aclose(self) -> None:
        """Closes all connections."""
        for member in self._members.values():
            await member.engine.aclose()
        self._members.clear()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        """Draws `n` completions of one prompt; calls of one `session` (else: of one prompt) prefer one engine."""
        request = _Request(_key(session, prompt_ids), tuple(prompt_ids), sampling, priority)
        begun = await self._asked(
            request.key, n, 0, lambda engine: engine.generate(prompt_ids, sampling, n=n, priority=priority)
        )
        if all(completion.finish_reason is not FinishReason.ABORT for completion in begun):
            return begun
        async with asyncio.TaskGroup() as tasks:
            going_on = [tasks.create_task(self._whole(request, index, drawn)) for index, drawn in enumerate(begun)]
        whole = []
        for task in going_on:
            ended = task.result()
            if isinstance(ended, EngineError):
                raise ended
            whole.append(ended)
        return whole

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs in nats at temperature 1 of tokens 1..L-1 given those before them."""
        return await self._asked(_key("", token_ids), 1, 0, lambda engine: engine.score(token_ids))

    async def update_weights(self, version: int, path: Path) -> None:
        """Has one engine after another serve the weights at `path`; returns when all that answer do, and one does.

        Raises `RequestRefused` when every engine refuses them, and `EngineUnavailable` when none answers for long.
        """
        async with self._loading:
            self._target = _Target(version, path)
            refusals: list[RequestRefused] = []
            for wave in waves([m.name for m in self._members.values() if m.state is State.READY]):
                async with asyncio.TaskGroup() as loading:
                    for name in wave:
                        if name in self._members:
                            loading.create_task(self._load(self._members[name], refusals), name=f"loading {name}")
            if refusals and not any(member.version >= version for member in self._members.values()):
                for member in self._members.values():  # they serve what they served
                    member.state = State.READY if member.state is State.UPDATING else member.state
                raise refusals[0]
            for member in self._members.values():
                if member.state is State.UPDATING:
                    self._lose(member, str(refusals[0]))
        await self._until(lambda: any(m.state is State.READY and m.version >= version for m in self._members.values()))

    async def info(self) -> EngineInfo:
        """Of all engines that answer: sums, and the oldest version."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            members = [member for member in self._members.values() if member.state is not State.AWAY]
            infos = [info for info in await asyncio.gather(*map(self._info, members)) if info is not None]
            if infos:
                return summed(infos)
            await self._wait(deadline_s)

    async def _info(self, member: _Member) -> EngineInfo | None:
        served = member.version  # before the question: an update may end while it is under way
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                info = await member.engine.info()
        except (EngineError, TimeoutError) as error:
            self._lose(member, str(error) or f"no answer in {CHECK_TIMEOUT_S:g} s")
            return None
        if info.version < served:
            self._lose(member, f"{member.name} lost version {served}: it started anew, or got other weights")
            return None
        return info

    async def _whole(self, request: "_Request", index: int, drawn: Completion) -> Completion | EngineError:
        """The completion `drawn`, gone on with for as long as it is cut off."""
        fruitless = 0
        while drawn.finish_reason is FinishReason.ABORT and fruitless < FRUITLESS_ABORTS:
            left = partial.rest(request.prompt_ids, request.sampling, drawn, index)
            if left is None:
                return partial.full(drawn)
            prompt_ids, sampling = left
            at_least = drawn.versions[-1] if drawn.versions else 0
            ask = _generation(prompt_ids, sampling, request.priority)
            try:
                (more,) = await self._asked(request.key, 1, at_least, ask)
            except EngineError as error:
                return error
            if not more.token_ids:
                await asyncio.sleep(_backoff_s(fruitless))
            fruitless = 0 if more.token_ids else fruitless + 1
            drawn = partial.joined(drawn, more)
        return drawn

    async def _asked(self, key: bytes, count: int, at_least: int, ask: Callable[[PoolEngine], Awaitable[T]]) -> T:
        """The answer of the first engine that gives one. Raises `RequestRefused`, or `EngineUnavailable` at the end."""
        deadline_s = time.monotonic() + self._patience_s
        failed: set[str] = set()
        rounds = 0
        while True:
            name = chosen(key, self.seats, count=count, at_least=at_least, avoid=failed)
            if name is None and failed:  # every engine that could has failed once: once more, after a while
                failed.clear()
                await self._pause(deadline_s, _backoff_s(rounds))
                rounds += 1
            elif name is None:
                await self._wait(deadline_s)
            else:
                member = self._members[name]
                try:
                    return await self._asked_of(member, count, ask)
                except EngineUnavailable as error:
                    failed.add(name)
                    member.last_error = self._last_error = str(error)
                await self._check(member)

    async def _asked_of(self, member: _Member, count: int, ask: Callable[[PoolEngine], Awaitable[T]]) -> T:
        """The answer of one engine. Raises `EngineUnavailable` as well when the engine is lost meanwhile."""
        member.load += count
        call = asyncio.timeout(None)
        try:
            async with call:
                member.calls.add(call)
                return await ask(member.engine)
        except TimeoutError:
            raise EngineUnavailable(member.last_error) from None
        finally:
            member.calls.discard(call)
            member.load -= count
            if member.name not in self._members:
                self._notify()

    async def _check(self, member: _Member) -> None:
        """Finds out whether an engine answers, and brings it up when it does again."""
        if member.state is State.UPDATING or self._members.get(member.name) is not member:
            return
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await member.engine.alive()
        except (EngineUnavailable, TimeoutError) as error:
            self._lose(member, str(error) or f"no answer in {CHECK_TIMEOUT_S:g} s")
        else:
            if member.state is State.AWAY:
                await self._bring_back(member)

    async def _bring_back(self, member: _Member) -> None:
        async with self._loading:
            if member.state is not State.AWAY or self._members.get(member.name) is not member:
                return
            try:
                version = (await member.engine.info()).version  # it may have started anew
                member.version = await self._brought_up(member.engine, version)
            except EngineError as error:
                member.last_error = self._last_error = str(error)
            else:
                member.state = State.READY
                self._notify()

    async def _brought_up(self, engine: PoolEngine, version: int) -> int:
        """Has an engine serve the newest weights if it does not; the version it serves then."""
        target = self._target
        if target is None:
            return version
        newest = max(target.version, self._recovered)
        if version > newest:
            raise EngineUnavailable(
                f"expected an engine that serves version {newest} of this run or an older one, got version {version}: "
                f"its weights are another run's; start it again"
            )
        if version >= target.version:
            return version
        await _loaded(engine, target)
        return target.version

    async def _load(self, member: _Member, refusals: list[RequestRefused]) -> None:
        """Loads the target into one engine, which stays `UPDATING` when it refuses."""
        assert self._target is not None
        member.state = State.UPDATING
        try:
            await _loaded(member.engine, self._target)
        except RequestRefused as error:
            refusals.append(error)
        except EngineUnavailable as error:
            self._lose(member, str(error))
        else:
            member.version, member.state = self._target.version, State.READY
            self._notify()

    def _lose(self, member: _Member, reason: str) -> None:
        """Gives an engine no more requests, and those that it has to others: it may hang and never answer them."""
        member.state, member.last_error = State.AWAY, reason
        self._last_error = reason
        calls, member.calls = member.calls, set()  # one that is expiring cannot be asked to again
        for call in calls:
            call.reschedule(asyncio.get_running_loop().time())

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout_s: float) -> None:
        """Returns when an engine came, went or got better, or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _wait(self, deadline_s: float) -> None:
        """Waits for a change. Raises `EngineUnavailable` when there is none before the deadline."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineUnavailable(f"no engine for {self._patience_s:g} s; the last error: {self._last_error}")
        await self._change(min(left_s, LONGEST_BACKOFF_S))

    async def _pause(self, deadline_s: float, seconds: float) -> None:
        if time.monotonic() > deadline_s:
            raise EngineUnavailable(f"no engine for {self._patience_s:g} s; the last error: {self._last_error}")
        await asyncio.sleep(seconds)

    async def _until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while not true():
            await self._wait(deadline_s)


@dataclass(frozen=True, slots=True)
class _Request:
    key: bytes
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    priority: int


def _generation(
    prompt_ids: Sequence[int], sampling: Sampling, priority: int
) -> Callable[[PoolEngine], Awaitable[list[Completion]]]:
    return lambda engine: engine.generate(prompt_ids, sampling, priority=priority)


async def _loaded(engine: PoolEngine, target: _Target) -> None:
    try:
        async with asyncio.timeout(UPDATE_TIMEOUT_S):
            await engine.update_weights(target.version, target.path)
    except TimeoutError:
        raise EngineUnavailable(f"version {target.version} was not loaded in {UPDATE_TIMEOUT_S:g} s") from None


def _key(session: str, token_ids: Collection[int]) -> bytes:
    text = session.encode() if session else ",".join(map(str, token_ids)).encode()
    return blake2b(text, digest_size=16).digest()


def _backoff_s(rounds: int) -> float:
    return min(BACKOFF_S * 2.0**rounds, LONGEST_BACKOFF_S)
