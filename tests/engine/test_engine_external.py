"""What goes out of a server of another project while it takes new weights, whichever server it is."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.engine.external.external_server import ForeignEngine
from shoal.engine.external.server_adapter import (
    Abilities,
    Asked,
    SampledCompletion,
    StopMode,
    counted,
    finish_reason,
)
from shoal.engine.pool import canary
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.server.protocol import VersionSpan
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused
from shoal.types import Completion, FinishReason, Sampling
from until import until

RIGHT, WRONG = -1.0, -3.0


@dataclass
class Scripted:
    """A server whose draws and scores end when a test says so."""

    version_: int = 0
    keeps: bool = True
    lies: bool = False
    """Computes with other weights after the next load than those it was given."""
    closed: bool = False
    drawing: asyncio.Event = field(default_factory=asyncio.Event)
    scoring: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    logprob: float = RIGHT
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for event in (self.drawing, self.scoring, self.loading):
            event.set()

    async def abilities(self) -> Abilities:
        return Abilities("scripted", 64, True, self.keeps)

    async def sample(self, asked: Asked) -> list[SampledCompletion]:
        """A token before, and the others after the test has let it go on."""
        tokens = [(self.version_, self.logprob)]
        self.asked.append("sample")
        resume = asyncio.create_task(self.drawing.wait())
        abort = asyncio.create_task(self.aborted.wait())
        _, waiting = await asyncio.wait((resume, abort), return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        reason = FinishReason.LENGTH
        if self.aborted.is_set():
            self.aborted.clear()
            reason = FinishReason.ABORT
        else:
            tokens += [(self.version_, self.logprob)] * (asked.sampling.max_tokens - 1)
        spans = (
            tuple(VersionSpan(str(version), i, i + 1) for i, (version, _) in enumerate(tokens)) if self.keeps else None
        )
        return [SampledCompletion((5,) * len(tokens), tuple(logprob for _, logprob in tokens), reason, spans)] * asked.n

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        self.asked.append("score")
        computed = [self.logprob] * (len(token_ids) - 1)
        await self.scoring.wait()
        return computed

    async def takes_adapters(self) -> bool:
        return False

    async def load_adapter(self, name: str, directory: Path) -> None:
        raise AssertionError

    async def unload_adapter(self, name: str) -> None:
        raise AssertionError

    async def adapters(self) -> list[str]:
        return ["m"]

    async def stop(self, how: StopMode) -> None:
        if how is StopMode.ABORT:
            self.aborted.set()

    async def load(self, directory: Path, version: int, how: StopMode) -> None:
        self.asked.append("load")
        await self.loading.wait()
        self.version_, self.logprob = version, WRONG if self.lies else RIGHT

    async def version(self) -> int | None:
        return self.version_

    async def label(self, version: int) -> None:
        self.version_ = version

    async def resume(self) -> None:
        pass

    async def abort(self) -> None:
        pass

    async def alive(self) -> None:
        pass

    async def counters(self) -> dict[str, int]:
        return {}

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with the canary of any Version."""
    canary.write(canary.Canary((1, 2, 3), (RIGHT, RIGHT), 1e-3), tmp_path)
    return tmp_path


async def started(server: Scripted, on_update: str = "recompute") -> ForeignEngine:
    engine = await ForeignEngine.start(server, on_update=on_update, model_dir=Path(), sampling=Sampling(4))
    server.asked.clear()
    return engine


async def under_canary(server: Scripted, engine: ForeignEngine, version: int, weights: Path) -> asyncio.Task[None]:
    """An update whose canary was asked and has not answered."""
    server.scoring.clear()
    updating = asyncio.create_task(engine.update_weights(version, weights))
    await until(lambda: "score" in server.asked)
    server.asked.clear()
    return updating


@pytest.mark.parametrize("lies", [False, True])
async def test_tokens_of_new_weights_go_out_only_when_the_canary_has_passed(lies: bool, weights: Path) -> None:
    server = Scripted()
    engine = await started(server)
    server.lies = lies
    server.drawing.clear()
    both = asyncio.create_task(engine.generate([1], Sampling(4)))  # begun by the old weights, ended by the new
    await until(lambda: "sample" in server.asked)
    updating = await under_canary(server, engine, 1, weights)
    server.drawing.set()
    new = asyncio.create_task(engine.generate([1], Sampling(4)))
    scored = asyncio.create_task(engine.scored([1, 2]))
    await until(lambda: {"sample", "score"} <= set(server.asked))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [task.done() for task in (both, new, scored)] == [False] * 3
    server.scoring.set()
    if lies:
        with pytest.raises(RequestRefused, match="computes with other weights"):
            await updating
        for asked in (both, new, scored):
            with pytest.raises(EngineUnavailable, match="no whole weights"):
                await asked
    else:
        await updating
        assert [(await task)[0].versions for task in (both, new)] == [(0, 1, 1, 1), (1, 1, 1, 1)]
        assert (await scored).logprobs == [RIGHT]


@pytest.mark.parametrize("why", list(FinishReason))
@pytest.mark.parametrize("ids", [(5, 2), (2,), (5, 5), (2, 5), ()])
async def test_an_answer_that_ends_in_its_first_stop_token_was_stopped(why: FinishReason, ids: tuple[int, ...]) -> None:
    class Ending(Scripted):
        async def sample(self, asked: Asked) -> list[SampledCompletion]:
            if asked.name.startswith("probe"):
                return await super().sample(asked)
            return [SampledCompletion(ids, (RIGHT,) * len(ids), why, None)]

    engine = await started(Ending())
    (answer,) = await engine.generate([1], Sampling(2, stop_token_ids=(2,)))
    assert answer.token_ids == ids
    assert answer.finish_reason is (FinishReason.STOP if ids in ((5, 2), (2,)) else why)
    assert (await engine.info()).foreign


async def test_answers_of_the_old_weights_wait_for_no_canary(weights: Path) -> None:
    server = Scripted()
    engine = await started(server)
    server.loading.clear()
    updating = asyncio.create_task(engine.update_weights(1, weights))
    await until(lambda: "load" in server.asked)
    assert (await engine.generate([1], Sampling(4)))[0].versions == (0, 0, 0, 0)
    assert not updating.done()
    server.loading.set()
    await updating


async def test_what_new_weights_cut_off_goes_out_before_the_canary(weights: Path) -> None:
    server = Scripted(keeps=False)
    engine = await started(server)
    assert engine.how is StopMode.ABORT
    server.drawing.clear()
    cut_off = asyncio.create_task(engine.generate([1], Sampling(4)))
    await until(lambda: "sample" in server.asked)
    updating = await under_canary(server, engine, 1, weights)
    (partial,) = await cut_off
    assert (partial.finish_reason, partial.versions) == (FinishReason.ABORT, (0,))
    assert not updating.done()
    server.scoring.set()
    await updating


async def test_an_answer_that_lived_through_a_failed_load_is_lost_though_the_next_one_is_whole(weights: Path) -> None:
    server = Scripted()
    engine = await started(server)
    server.drawing.clear()
    server.lies = True
    long = asyncio.create_task(engine.generate([1], Sampling(4)))
    with pytest.raises(RequestRefused):
        await engine.update_weights(1, weights)
    with pytest.raises(EngineUnavailable, match="no whole weights"):
        await engine.generate([1], Sampling(4))
    server.lies = False
    await engine.update_weights(1, weights)  # the same name, so that its tokens do not show which weights drew them
    server.drawing.set()
    with pytest.raises(EngineUnavailable, match="not whole"):
        await long
    assert (await engine.generate([1], Sampling(4)))[0].versions == (1, 1, 1, 1)


async def test_a_load_that_is_given_up_leaves_no_whole_weights(weights: Path) -> None:
    server = Scripted()
    engine = await started(server)
    updating = await under_canary(server, engine, 1, weights)
    updating.cancel()
    await asyncio.wait((updating,))
    with pytest.raises(EngineUnavailable, match="no whole weights"):
        await engine.generate([1], Sampling(4))
    assert (await engine.info()).version < 0  # a pool has it load them again
    server.scoring.set()
    await engine.update_weights(1, weights)
    assert (await engine.generate([1], Sampling(1)))[0].versions == (1,)


def test_a_pool_draws_elsewhere_what_a_lying_server_drew_and_takes_it_back_once_it_is_whole(weights: Path) -> None:
    async def asking(pool: EnginePool, answers: list[Completion]) -> None:
        for i in range(10**6):
            answers += await pool.generate([i], Sampling(4))
            await asyncio.sleep(0)

    async def run() -> None:
        servers = [Scripted(), Scripted()]
        pool = EnginePool(check_every_s=0.005)
        for i, server in enumerate(servers):
            await pool.join(str(i), await started(server))
        servers[0].lies = True
        answers: list[Completion] = []
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(asking(pool, answers)) for _ in range(8)]
            beside.append(tasks.create_task(pool.watch()))
            servers[0].drawing.clear()
            servers[0].scoring.clear()
            servers[0].asked.clear()
            await until(lambda: "sample" in servers[0].asked)
            updating = tasks.create_task(pool.update_weights(1, weights))
            await until(lambda: "score" in servers[0].asked)
            servers[0].drawing.set()
            before = len(answers)
            await until(lambda: len(answers) > before + 20)
            servers[0].scoring.set()
            await updating
            await until(lambda: pool.replicas[0].state == "away")
            servers[0].lies = False
            await until(lambda: [replica.version for replica in pool.replicas if replica.state == "ready"] == [1, 1])
            for task in beside:
                task.cancel()
        assert {logprob for answer in answers for logprob in answer.logprobs} == {RIGHT}
        assert {answer.versions[0] for answer in answers} == {0, 1}

    asyncio.run(run())


async def test_a_server_that_cannot_be_used_is_let_go() -> None:
    class Refusing(Scripted):
        async def label(self, version: int) -> None:
            raise RequestRefused("no names")

        async def version(self) -> int | None:
            return None

    server = Refusing()
    with pytest.raises(ConfigError, match="no names"):
        await started(server)
    assert server.closed


def test_words_and_numbers_that_are_none_end_nothing() -> None:
    with pytest.raises(EngineUnavailable, match="ended an answer with 'repetition'; expected one of stop, length"):
        finish_reason("repetition")
    assert counted("drawn NaN\ndrawn +Inf\ndrawn x\ndrawn 2.0\n", {"drawn": "tokens"}) == {"tokens": 2}
