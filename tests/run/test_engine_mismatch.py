"""The watch of each engine's logprobs, with the trainer's as the arbiter."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.pool.engine_pool import EnginePool, PoolRequest
from shoal.engine.pool.replica import Replica, ReplicaState
from shoal.errors import ConfigError
from shoal.interfaces import EngineInfo
from shoal.run.engine_watch import ALLOWED_NATS, ALLOWED_TIMES, ENOUGH_TOKENS, MOST_ROWS, EngineMismatch
from shoal.run.training import logprob_mismatch
from shoal.types import Completion, FinishReason, Sampling

TRUE_NATS = -2.0
ROW = 16
"""Tokens of an answer."""


@dataclass
class Sampled:
    """Engine that reports logprobs off the trainer's by so many nats."""

    off: float
    version: int = 0

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, n: int = 1, **named: Any
    ) -> list[Completion]:
        length = sampling.max_tokens
        return [Completion((7,) * length, (TRUE_NATS + self.off,) * length, (0,) * length, FinishReason.LENGTH)] * n

    async def info(self) -> EngineInfo:
        return EngineInfo(self.version, "", 64, 0.5, 1, 1, 0, 1, 0)

    async def update_weights(self, version: int, path: Path) -> None:
        self.version = version

    async def alive(self) -> None: ...

    async def abort(self) -> None: ...

    async def aclose(self) -> None: ...


async def trainer(rows: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    assert 0 < len(rows) <= MOST_ROWS
    return tuple((TRUE_NATS,) * (len(row) - 1) for row in rows)


async def pool_of(offs: Sequence[float], said: list[str]) -> EnginePool:
    pool = EnginePool(patience_s=5, on_event=said.append)
    for number, off in enumerate(offs):
        engine: Any = Sampled(off)
        await pool.join(f"engine {number}", engine)
    return pool


async def looked(pool: EnginePool, watch: EngineMismatch, temperature: float = 1.0) -> None:
    """Enough answers of every engine for one judgement, and the comparisons of some steps."""
    each = -(-ENOUGH_TOKENS // ROW)
    for _ in range(each):
        for replica in pool.replicas:
            if replica.state is ReplicaState.READY:
                request = pool._generation(request_of(temperature), Sampling(ROW, temperature=temperature), 1)
                await pool._ask_replica(replica, 1, request)
        await watch.compare(trainer, 1.0)


def request_of(temperature: float) -> PoolRequest:
    return PoolRequest(b"", (1, 2), Sampling(ROW, temperature=temperature), 0, 0)


def rested(pool: EnginePool) -> None:
    for replica in pool.replicas:
        replica.rests_until_s = 0.0
        if not replica.left_out:
            replica.state = ReplicaState.READY


@settings(max_examples=30)
@given(st.lists(st.floats(-ALLOWED_NATS, ALLOWED_NATS), min_size=2, max_size=6), st.integers(0, 5))
def test_only_the_engine_that_departs_from_the_others_rests_and_then_is_left_out(offs: list[float], rogue: int) -> None:
    """However the others agree with the trainer within the bound, whoever the rogue is."""
    said: list[str] = []
    rogue %= len(offs)
    others = [abs(off) for number, off in enumerate(offs) if number != rogue]
    offs = [min(off, 2.0 + TRUE_NATS) for off in offs]
    offs[rogue] = -(ALLOWED_NATS + ALLOWED_TIMES * max(others) + 0.1)

    async def run() -> list[Replica]:
        pool = await pool_of(offs, said)
        watch = EngineMismatch(pool)
        for look in range(3):
            await looked(pool, watch)
            assert len(said) == look + 1, (offs, said)
            assert pool.replicas[rogue].resting
            rested(pool)
        await looked(pool, watch)
        return list(pool.replicas)

    replicas = asyncio.run(run())
    assert [replica.left_out for replica in replicas] == [number == rogue for number in range(len(offs))]
    assert all(sentence.startswith(f"engine {rogue}: its logprobs differ") for sentence in said)
    assert [("it is left out" in sentence) for sentence in said] == [False, False, True]


async def test_an_engine_that_agrees_again_is_forgiven_and_one_engine_alone_is_not_judged() -> None:
    said: list[str] = []

    pool = await pool_of([0.0, -5.0], said)
    watch, rogue = EngineMismatch(pool), pool.replicas[1]
    for off in (-5.0, -5.0, 0.0, -5.0, -5.0):
        rogue.engine.off = off  # type: ignore[attr-defined]
        await looked(pool, watch)
        assert rogue.resting == (off < 0)
        rested(pool)
    assert not rogue.left_out
    assert len(said) == 4
    await pool.leave("engine 0")
    await looked(pool, watch)
    assert len(said) == 4


async def test_answers_that_tell_nothing_of_an_engine_s_arithmetic_are_not_compared() -> None:
    pool = await pool_of([0.0, -5.0], [])
    watch = EngineMismatch(pool)
    await looked(pool, watch, temperature=0.5)  # of an evaluation, say
    for sampling in (Sampling(ROW, temperature=0), Sampling(ROW, top_k=2), Sampling(ROW, top_p=0.5)):
        assert not sampling.is_plain
        await pool.generate([1, 2], sampling)
    await watch.compare(trainer, 1.0)
    assert not any(replica.resting for replica in pool.replicas)


def test_an_engine_that_reports_an_older_version_than_it_loaded_rests() -> None:
    said: list[str] = []

    async def run() -> None:
        pool = await pool_of([0.0, 0.0], said)
        pool.replicas[1].version = 3
        info = await pool.info()
        assert info == replace(await pool.replicas[0].engine.info(), checksum="")
        assert pool.replicas[1].resting

    asyncio.run(run())
    assert said == ["engine 1 gave a wrong answer: version: expected at least 3, which it has loaded, got 0; it rests"]


async def test_an_engine_that_is_set_to_rest_while_it_loads_weights_rests_on() -> None:
    loading, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Sampled):
        async def update_weights(self, version: int, path: Path) -> None:
            loading.set()
            await go_on.wait()
            self.version = version

    pool = await pool_of([0.0], [])
    slow: Any = Slow(-5.0)
    await pool.join("slow", slow)
    updating = asyncio.create_task(pool.update_weights(1, Path("nowhere")))
    await loading.wait()
    pool.judge("slow", "it departs")
    go_on.set()
    await updating
    assert [replica.state for replica in pool.replicas] == [ReplicaState.READY, ReplicaState.AWAY]


@pytest.mark.parametrize("offs", [[-1.0, 0.0], [-1.0, -1.0, 0.0], [0.0, -1.0]])
async def test_a_run_begins_with_the_engine_that_agrees_whichever_answers_first(offs: list[float]) -> None:
    said: list[str] = []
    policy = await policy_of(offs, said)
    assert await logprob_mismatch(policy) == 0.0
    assert not any(replica.resting for replica in policy.engine.replicas if replica.engine.off == 0.0)


async def test_a_run_of_engines_that_all_differ_from_the_trainer_does_not_begin() -> None:
    with pytest.raises(ConfigError, match="engine and trainer disagree about the same tokens"):
        await logprob_mismatch(await policy_of([-1.0, -2.0], []))


async def policy_of(offs: Sequence[float], said: list[str]) -> Any:
    prepared = SimpleNamespace(
        renderer=SimpleNamespace(stop_token_ids=(), prompt_ids=lambda messages: (1, 2)),
        service=SimpleNamespace(draw=lambda split, index: SimpleNamespace(messages=())),
    )
    config = SimpleNamespace(seed=0, model=SimpleNamespace(dtype="float32"))
    trained = SimpleNamespace(logprobs=trainer)
    return SimpleNamespace(prepared=prepared, config=config, trainer=trained, engine=await pool_of(offs, said))
