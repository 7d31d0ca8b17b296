"""Many engines as one: fakes at the Protocol for every order of events, real processes for real deaths."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_server import TOKEN, changed_weights, serving
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import FAILURES_IN_A_ROW
from shoal.engine.server.http_client import HttpEngine
from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.interfaces import EngineInfo
from shoal.types import Completion, FinishReason, Sampling
from shoal.weights.store import WeightStore
from until import until

PROMPT = [5, 6, 7, 8]
NOWHERE = Path("nowhere")


def true_token(context: Sequence[int]) -> int:
    """What every engine draws after a context, under any weights: an answer is right or wrong as a whole."""
    return (sum(context) * 31 + len(context)) % 97


def true_answer(prompt: Sequence[int], length: int) -> tuple[int, ...]:
    row = list(prompt)
    for _ in range(length):
        row.append(true_token(row))
    return tuple(row[len(prompt) :])


@dataclass
class CountingEngine:
    """Draws `true_token`s, one per turn of the event loop; can die, come back, hang, refuse weights and abort."""

    version: int = 0
    dead: bool = False
    refuses: bool = False
    hangs: bool = False
    logprob: float = -0.5
    """Of each token that it scores, in nats."""
    generation: int = 0
    """Counts aborts: requests of an earlier one end."""
    served: list[int] = field(default_factory=list)
    pool: EnginePool | None = None
    """That it is in: it says whether others take requests while this one loads weights."""
    closed: bool = False

    def answering(self) -> None:
        if self.dead:
            raise EngineUnavailable("dead")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, adapter: str = ""
    ) -> list[Completion]:
        self.answering()
        generation, row, versions = self.generation, list(prompt_ids), list[int]()
        finish = FinishReason.LENGTH
        while len(versions) < sampling.max_tokens:
            await asyncio.sleep(0)
            await until(lambda: not self.hangs)
            self.answering()
            if generation != self.generation:
                finish = FinishReason.ABORT
                break
            row.append(true_token(row))
            versions.append(self.version)
        ids = tuple(row[len(prompt_ids) :])
        return [Completion(ids, (-0.5,) * len(ids), tuple(versions), finish)] * n

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
    ) -> ScoreResponse:
        self.answering()
        return ScoreResponse([self.logprob] * (len(token_ids) - 1))

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        raise RequestRefused("no adapters")

    async def unload_adapter(self, name: str) -> dict[str, int]:
        raise RequestRefused("no adapters")

    async def update_weights(self, version: int, path: Path) -> None:
        if self.pool is not None:
            states = [replica.state for replica in self.pool.replicas if replica.state != "away"]
            assert "ready" in states or len(states) <= 1 or self.refuses, "all stopped at once"
        await asyncio.sleep(0)
        self.answering()
        if self.refuses:
            raise RequestRefused("bad weights")
        self.version = version
        self.served.append(version)

    async def info(self) -> EngineInfo:
        self.answering()
        return EngineInfo(self.version, "", 64, 0.5, 10, 10, 0, 1, 0)

    async def alive(self) -> None:
        self.answering()

    async def abort(self) -> None:
        self.answering()
        self.generation += 1

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class SilentEngine(CountingEngine):
    """Says that it is alive, and keeps silent when it is asked to do something, for as long as it is told to."""

    silent_info: bool = False
    silent_load: bool = False
    silent_abort: bool = False
    infos: int = 0
    loads: list[int] = field(default_factory=list)
    """Versions that it began to load."""
    gone: int = -1
    """A Version whose files are not there any more."""

    async def info(self) -> EngineInfo:
        self.infos += 1
        await until(lambda: not self.silent_info)
        return await super().info()

    async def abort(self) -> None:
        await until(lambda: not self.silent_abort)

    async def update_weights(self, version: int, path: Path) -> None:
        self.loads.append(version)
        await until(lambda: not self.silent_load)
        if version == self.gone:
            raise RequestRefused("no such file")
        await super().update_weights(version, path)


async def joined(
    engines: Sequence[CountingEngine], patience_s: float = 60.0, check_timeout_s: float = 30.0
) -> EnginePool:
    pool = EnginePool(patience_s=patience_s, check_every_s=0.005, check_timeout_s=check_timeout_s)
    for i, engine in enumerate(engines):
        await pool.join(str(i), engine)
        engine.pool = pool
    return pool


def watched(
    engines: Sequence[CountingEngine], body: Callable[[EnginePool], Awaitable[None]], check_timeout_s: float = 30.0
) -> None:
    """Runs `body` with a pool of the engines that is looked after."""

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            pool = await joined(engines, check_timeout_s=check_timeout_s)
            watching = tasks.create_task(pool.watch())
            await body(pool)
            watching.cancel()

    asyncio.run(run())


def test_calls_of_one_session_go_to_one_engine() -> None:
    async def body(pool: EnginePool) -> None:
        for session in range(20):
            before = {replica.name: engine.version for replica, engine in zip(pool.replicas, engines, strict=True)}
            assert before
            asked = set()
            for turn in range(3):
                task = asyncio.create_task(pool.generate([turn], Sampling(5), session=f"s{session}"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                asked |= {replica.name for replica in pool.replicas if replica.load}
                await task
            assert len(asked) == 1

    engines = [CountingEngine() for _ in range(5)]
    watched(engines, body)


def test_an_engine_that_dies_loses_no_request_and_is_brought_up_when_it_is_back() -> None:
    async def body(pool: EnginePool) -> None:
        engines[0].hangs, few = True, range(FAILURES_IN_A_ROW - 2)  # so few failures that the engine does not rest
        asked = [asyncio.create_task(pool.generate([i], Sampling(40), n=2)) for i in few]
        await until(lambda: pool.replicas[0].load > 0)
        engines[0].dead, engines[0].hangs = True, False
        for i, task in enumerate(asked):
            assert [c.token_ids for c in await task] == [true_answer([i], 40)] * 2
        await until(lambda: pool.replicas[0].state == "away")
        await pool.update_weights(3, NOWHERE)
        assert (engines[0].version, engines[1].version) == (0, 3)
        assert (await pool.info()).version == 3
        engines[0].dead = False
        await until(lambda: pool.replicas[0].state == "ready")
        assert engines[0].version == 3

    engines = [CountingEngine(), CountingEngine()]
    watched(engines, body)


def test_a_request_waits_for_the_only_engine_to_come_back() -> None:
    async def body(pool: EnginePool) -> None:
        engine.dead = True
        waiting = asyncio.create_task(pool.generate([1], Sampling(3)))
        await until(lambda: pool.replicas[0].state == "away")
        assert not waiting.done()
        engine.dead = False
        assert (await waiting)[0].token_ids == true_answer([1], 3)

    engine = CountingEngine()
    watched([engine], body)


def test_an_engine_that_hangs_gives_its_requests_back() -> None:
    async def body(pool: EnginePool) -> None:
        engines[0].hangs = True
        asked = [asyncio.create_task(pool.generate([i], Sampling(9))) for i in range(20)]
        await until(lambda: sum(task.done() for task in asked) > 0 and pool.replicas[1].load == 0)
        assert any(not task.done() for task in asked)
        engines[0].dead = True  # it hangs, and its health says so
        for i, task in enumerate(asked):
            assert (await task)[0].token_ids == true_answer([i], 9)

    engines = [CountingEngine(), CountingEngine()]
    watched(engines, body)


@pytest.mark.parametrize("silent", ["silent_info", "silent_load"])
def test_an_engine_that_hangs_while_it_is_brought_back_holds_up_only_itself(silent: str) -> None:
    async def body(pool: EnginePool) -> None:
        await pool.update_weights(1, NOWHERE)
        hanging.dead = True
        await until(lambda: pool.replicas[0].state == "away")
        await pool.update_weights(2, NOWHERE)
        setattr(hanging, silent, True)
        before, hanging.dead = hanging.infos, False
        await until(lambda: hanging.loads[-1] == 2 if silent == "silent_load" else hanging.infos > before)
        dying.dead = True
        await until(lambda: pool.replicas[1].state == "away")
        async with asyncio.timeout(10):
            assert (await pool.generate([1], Sampling(3)))[0].token_ids == true_answer([1], 3)
            await pool.update_weights(3, NOWHERE)
            await pool.join("late", CountingEngine())
        assert [(replica.name, replica.state, replica.version) for replica in pool.replicas[2:]] == [
            ("2", "ready", 3),
            ("late", "ready", 3),
        ]
        setattr(hanging, silent, False)
        await until(lambda: pool.replicas[0].state == "ready")
        assert pool.replicas[0].version == hanging.version == 3

    hanging, dying = SilentEngine(), CountingEngine()
    watched([hanging, dying, CountingEngine()], body)


def test_a_late_engine_that_hangs_holds_up_no_update() -> None:
    async def body(pool: EnginePool) -> None:
        joining = asyncio.create_task(pool.join("late", late))
        await until(lambda: late.infos == 1)
        async with asyncio.timeout(10):
            await pool.update_weights(1, NOWHERE)
        late.silent_info = False
        await joining
        assert [replica.version for replica in pool.replicas] == [1, 1]

    late = SilentEngine(silent_info=True)
    watched([CountingEngine()], body)


async def test_engines_that_come_or_leave_while_their_pool_ends_are_closed() -> None:
    leaving, coming = SilentEngine(silent_abort=True), SilentEngine(silent_info=True)
    pool = await joined([leaving])
    left, came = asyncio.create_task(pool.leave("0")), asyncio.create_task(pool.join("late", coming))
    await until(lambda: coming.infos == 1 and not pool.replicas)
    await pool.aclose()
    assert (leaving.closed, coming.closed) == (False, False)
    left.cancel()
    coming.silent_info = False
    with pytest.raises(EngineUnavailable, match="the pool has been closed"):
        await came
    await asyncio.wait({left})
    assert (leaving.closed, coming.closed) == (True, True)


def test_an_engine_that_does_not_say_what_it_serves_is_asked_again() -> None:
    async def body(pool: EnginePool) -> None:
        engine.dead = True
        await until(lambda: pool.replicas[0].state == "away")
        engine.silent_info, engine.dead = True, False
        await until(lambda: engine.infos > before + 2)
        assert pool.replicas[0].state == "away"
        engine.silent_info = False
        await until(lambda: pool.replicas[0].state == "ready")

    engine = SilentEngine()
    before = engine.infos
    watched([engine, CountingEngine()], body, check_timeout_s=0.05)


@pytest.mark.parametrize("gone", [-1, 1])
def test_an_engine_that_was_loading_weights_when_newer_ones_came_serves_those(gone: int) -> None:
    async def body(pool: EnginePool) -> None:
        late.dead = True
        await until(lambda: pool.replicas[0].state == "away")
        await pool.update_weights(1, NOWHERE)
        late.silent_load, late.dead = True, False
        await until(lambda: late.loads == [1])
        async with asyncio.timeout(10):
            await pool.update_weights(2, NOWHERE)
        late.silent_load, late.gone = False, gone  # a run removes files once newer weights are served
        await until(lambda: pool.replicas[0].state == "ready")
        assert (late.loads, pool.replicas[0].version) == ([1, 2], 2)

    late = SilentEngine()
    watched([late, CountingEngine()], body)


def test_a_refused_question_about_health_is_a_death_and_ends_nothing() -> None:
    class Proxied(CountingEngine):
        async def alive(self) -> None:
            if self.dead:
                raise RequestRefused("404 page not found")

    async def body(pool: EnginePool) -> None:
        engines[0].dead = True
        await until(lambda: pool.replicas[0].state == "away")
        engines[0].dead = False
        await until(lambda: pool.replicas[0].state == "ready")

    engines = [Proxied(), CountingEngine()]
    watched(engines, body)


@pytest.mark.parametrize("why", ["the engine is lost", "the engine is full"])
def test_versions_never_decrease_over_the_turns_of_a_session_while_engines_are_updated(why: str) -> None:
    async def body(pool: EnginePool) -> None:
        updating = asyncio.create_task(pool.update_weights(5, NOWHERE))
        await until(lambda: loading.loads == [5])  # the first engine serves 5, the last one still 0
        for number in range(100):
            (first,) = await pool.generate([1], Sampling(3), session=f"s{number}")
            if first.versions == (5, 5, 5):
                break
        others, load = [], 0
        if why == "the engine is lost":
            new.dead = True
        else:
            new.hangs = True
            others = [asyncio.create_task(pool.generate([i], Sampling(1))) for i in range(20)]
            await until(lambda: sum(not task.done() for task in others) == pool.replicas[0].load >= 2)
        load = pool.replicas[0].load
        second = asyncio.create_task(pool.generate([1, *first.token_ids, 2], Sampling(3), session=f"s{number}"))
        await until(lambda: second.done() or pool.replicas[0].state == "away" or pool.replicas[0].load > load > 0)
        loading.silent_load = new.hangs = False
        assert (await second)[0].versions == (5, 5, 5)
        await updating
        await asyncio.gather(*others)

    new, loading, old = CountingEngine(), SilentEngine(silent_load=True), CountingEngine()
    watched([new, loading, old], body)


async def test_nothing_answers_for_longer_than_the_patience() -> None:
    engine = CountingEngine()
    pool = await joined([engine], patience_s=0.1)
    engine.dead = True
    for asked in (pool.generate([1], Sampling(3)), pool.scored([1, 2])):
        with pytest.raises(EngineUnavailable, match=r"no engine for 0\.1 s; the last error: dead"):
            await asked
    with pytest.raises(EngineUnavailable, match="no engine"):
        await pool.info()


def test_a_refused_request_is_asked_of_one_other_engine() -> None:
    class Refusing(CountingEngine):
        async def scored(
            self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
        ) -> ScoreResponse:
            self.served.append(-1)
            raise RequestRefused("no such token")

    async def body(pool: EnginePool) -> None:
        with pytest.raises(RequestRefused, match="no such token"):
            await pool.scored([1, 2])
        assert sum(len(engine.served) for engine in engines) == 2

    engines = [Refusing(), Refusing(), Refusing()]
    watched(engines, body)


@dataclass
class HostedEngine(CountingEngine):
    """An engine of a host that fetches Versions before they are loaded."""

    pulling: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    """Of each load, how many hosts had begun to fetch."""
    hosts: "list[HostedEngine]" = field(default_factory=list)

    async def pull(self, version: int) -> None:
        self.pulling.append(version)
        if len(self.pulling) == 2:
            raise EngineUnavailable("the network is slow today")

    async def update_weights(self, version: int, path: Path) -> None:
        self.turns.append(sum(version in host.pulling for host in self.hosts))
        await super().update_weights(version, path)


def test_all_hosts_fetch_a_version_before_the_first_of_them_loads_it_and_may_fail() -> None:
    async def body(pool: EnginePool) -> None:
        for version in (1, 2):
            await pool.update_weights(version, NOWHERE)
        assert [engine.turns for engine in engines] == [[8, 8]] * 8
        assert {engine.version for engine in engines} == {2}

    engines = [HostedEngine() for _ in range(8)]
    for engine in engines:
        engine.hosts = engines
    watched(engines, body)


@pytest.mark.parametrize(("share", "most"), [(0.0, 1), (0.25, 2), (1.0, 8)])
def test_engines_load_one_after_the_other_or_all_at_once(share: float, most: int) -> None:
    async def run() -> None:
        pool = EnginePool(at_once=share)
        for number, engine in enumerate(engines):
            await pool.join(str(number), engine)
        await pool.update_weights(1, NOWHERE)

    together = Together()
    engines = [Loaded(together=together) for _ in range(8)]
    asyncio.run(run())
    assert together.most == most


@dataclass
class Together:
    """Engines that load weights now, and the most that did."""

    now: int = 0
    most: int = 0


@dataclass
class Loaded(CountingEngine):
    """An engine that counts those that load beside it."""

    together: Together = field(default_factory=Together)

    async def update_weights(self, version: int, path: Path) -> None:
        self.together.now += 1
        self.together.most = max(self.together.most, self.together.now)
        await super().update_weights(version, path)
        self.together.now -= 1


def test_weights_that_all_refuse_are_refused_and_the_old_ones_go_on() -> None:
    async def body(pool: EnginePool) -> None:
        await pool.update_weights(1, NOWHERE)
        for engine in engines:
            engine.refuses = True
        with pytest.raises(RequestRefused, match="bad weights"):
            await pool.update_weights(2, NOWHERE)
        assert (await pool.generate([1], Sampling(3)))[0].versions == (1, 1, 1)

    engines = [CountingEngine(), CountingEngine()]
    watched(engines, body)


def test_an_engine_that_alone_refuses_weights_gets_no_requests_until_it_takes_them() -> None:
    async def body(pool: EnginePool) -> None:
        engines[1].refuses = True
        await pool.update_weights(2, NOWHERE)
        for i in range(20):
            assert (await pool.generate([i], Sampling(1)))[0].versions == (2,)
        engines[1].refuses = False
        await until(lambda: pool.replicas[1].state == "ready")
        assert engines[1].version == 2

    engines = [CountingEngine(), CountingEngine()]
    watched(engines, body)


def test_an_engine_that_leaves_hands_its_answers_over_where_they_are() -> None:
    async def body(pool: EnginePool) -> None:
        asked = [asyncio.create_task(pool.generate([i], Sampling(50), n=2)) for i in range(40)]
        await until(lambda: all(replica.load for replica in pool.replicas))
        await pool.join("late", CountingEngine())
        await pool.leave("0")
        await pool.leave("1")
        assert [replica.name for replica in pool.replicas] == ["late"]
        for i, task in enumerate(asked):
            assert [c.token_ids for c in await task] == [true_answer([i], 50)] * 2

    watched([CountingEngine(), CountingEngine()], body)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_no_order_of_deaths_aborts_updates_and_comings_loses_or_mixes_up_an_answer(seed: int, count: int) -> None:
    rng = random.Random(seed)
    engines = [CountingEngine() for _ in range(count)]

    async def disturb(pool: EnginePool) -> None:
        version = 0
        for _ in range(25):
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.004]))
            victim = rng.choice(engines)
            match rng.randrange(4):
                case 0:
                    victim.dead = sum(engine.dead for engine in engines) < count - 1
                case 1:
                    victim.dead = False
                case 2:
                    victim.generation += 1
                case _:
                    version += 1
                    await pool.update_weights(version, NOWHERE)
        for engine in engines:
            engine.dead = False

    async def body(pool: EnginePool) -> None:
        asked = []
        disturbing = asyncio.create_task(disturb(pool))
        for i in range(40):
            asked.append(asyncio.create_task(pool.generate([i], Sampling(rng.randint(1, 60), seed=i), n=2)))
            await asyncio.sleep(rng.choice([0, 0.001]))
        await disturbing
        for i, task in enumerate(asked):
            for completion in await task:  # its versions never decrease: a Completion checks that by itself
                assert completion.token_ids == true_answer([i], len(completion.token_ids))
                assert completion.finish_reason is FinishReason.LENGTH

    watched(engines, body)


def test_kill_9_of_one_of_two_engine_processes_loses_no_request(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def ask(urls: list[str], pid: int) -> None:
        pool = EnginePool()
        for url in urls:
            await pool.join(url, HttpEngine(url, token=TOKEN))
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(pool.watch())
            asked = [tasks.create_task(pool.generate([*PROMPT, i % 90], Sampling(60, seed=i), n=2)) for i in range(150)]
            await until(lambda: sum(task.done() for task in asked) >= 20)
            assert all(replica.load for replica in pool.replicas)
            os.kill(pid, signal.SIGKILL)
            answers = [await task for task in asked]
            assert all(len(c.token_ids) == 60 for answer in answers for c in answer)
            await until(lambda: [replica.state for replica in pool.replicas] == ["away", "ready"])
            await pool.update_weights(4, changed_weights(tiny_model_dir, WeightStore(tmp_path), 4))
            (after,) = await pool.generate(PROMPT, Sampling(3))
            assert after.versions == (4, 4, 4)
            watching.cancel()
        await pool.aclose()

    with serving(tiny_model_dir, "--max-running", "16") as one, serving(tiny_model_dir, "--max-running", "16") as two:
        asyncio.run(ask([one.url, two.url], one.pid))


def test_an_engine_that_serves_another_run_is_not_taken_in() -> None:
    async def join(version: int, recovered: int) -> int:
        pool = EnginePool(initial=NOWHERE, recovered=recovered)
        await pool.join("left over", CountingEngine(version=version))
        return pool.replicas[0].version

    assert asyncio.run(join(7, recovered=7)) == 7
    with pytest.raises(EngineUnavailable, match=r"got version 7: its weights are another run's"):
        asyncio.run(join(7, recovered=0))
