"""Engines that lie, freeze or fail at once, beside honest ones: nothing of theirs is kept, and the pool goes on.

`python tests/engine/test_rogue_engine.py COUNT` asks so many generated answers; the suite asks few.
"""

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_pool import NOWHERE, CountingEngine, SilentEngine, true_answer, watched

from shoal.engine.pool import canary
from shoal.engine.pool.answers import AnswerRules, AskedTokens, check_completions
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import ReplicaState
from shoal.engine.server.http_client import HttpEngine
from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import EngineUnavailable, RequestRefused, WrongAnswer
from shoal.interfaces import EngineInfo
from shoal.types import Completion, FinishReason, Sampling
from stub_server import Stub, stubbed
from until import until

VOCABULARY, STOP, NEWEST = 97, 96, 3
SAMPLING = Sampling(4, stop_token_ids=(STOP,))
RIGHT: dict[str, Any] = {
    "index": 0,
    "token_ids": [5, 6, 7, 8],
    "finish_reason": "length",
    "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in (5, 6, 7, 8)]},
    "weight_versions": [{"version": 2, "start": 0, "end": 2}, {"version": NEWEST, "start": 2, "end": 4}],
    "routing": "",
}
integers = st.integers() | st.sampled_from([-1, VOCABULARY, STOP, 1_000_000, 2**31, 2**63 + 5, 2**70, 3 * 10**9])
numbers = st.floats() | st.sampled_from([0.1, -1e300, 1e-9, -0.0, math.inf]) | integers
values = st.none() | st.booleans() | integers | numbers | st.text(max_size=5) | st.just([]) | st.just({})


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A value with some part of another type, number, order or count."""
    if isinstance(value, dict) and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: draw(changed(value[key]))} if draw(st.booleans()) else {**value, key: draw(values)}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        how = draw(st.integers(0, 3))
        if how == 0:
            return value[:at] + value[at + 1 :]
        if how == 1:
            return [*value, value[at]]
        if how == 2:
            return draw(st.permutations(value))
        return [*value[:at], draw(changed(value[at])), *value[at + 1 :]]
    return draw(values)


def right(completion: Completion) -> bool:
    """Whether an answer could have been sampled by an engine of the run, in all that others can see of it."""
    ids = completion.token_ids
    ends = {FinishReason.LENGTH: len(ids) == 4 and STOP not in ids, FinishReason.STOP: ids[-1:] == (STOP,)}
    return (
        all(type(token) is int and 0 <= token < VOCABULARY for token in ids)
        and all(math.isfinite(one) and -3.5e38 < one <= 0 for one in completion.logprobs)
        and all(type(version) is int and 2 <= version <= NEWEST for version in completion.versions)
        and len(ids) == len(completion.logprobs) == len(completion.versions) <= 4
        and STOP not in ids[:-1]
        and ends.get(completion.finish_reason, STOP not in ids)
        and not completion.routing
    )


def rules() -> AnswerRules:
    return AnswerRules(VOCABULARY, routing=False)


async def answers_of(bodies: Sequence[object]) -> None:
    """Each body is given by a rogue engine beside an honest one; whatever the pool returns is right."""
    for body in bodies:
        rogue = Stub(
            {
                "/info": (200, msgspec.json.encode(EngineInfo(2, "", 64, 0.5, 1, 1, 0, 1, 0))),
                "/health": (200, b"{}"),
                "/inference/v1/generate": (200, msgspec.json.encode(body)),
                "/update_weights": (200, b'{"version": 3, "checksum": ""}'),
            }
        )
        async with stubbed(rogue) as url:
            pool = EnginePool(rules=rules(), patience_s=5, initial=NOWHERE, recovered=2)
            await pool.join("honest", CountingEngine(version=2))
            await pool.join("rogue", HttpEngine(url))
            for replica in pool.replicas:
                replica.load = 0 if replica.name == "rogue" else 5
            pool._loader.rules.newest = NEWEST
            (completion,) = await pool.generate([1, 2], SAMPLING)
            assert right(completion), body
            assert "/inference/v1/generate" in rogue.asked
            await pool.aclose()


@settings(max_examples=150, deadline=None)
@given(changed(RIGHT))
def test_whatever_a_rogue_engine_answers_only_right_answers_are_returned(choice: object) -> None:
    asyncio.run(answers_of([{"choices": [choice]}]))


@pytest.mark.parametrize(
    ("experts", "is_right"),
    [
        (b"", True),
        (bytes([15]) * 20, True),
        (bytes([255]) * 20, True),
        (bytes([16]) * 20, False),
        (bytes([15]) * 19 + bytes([254]), False),
        *((bytes(5 * width), False) for width in (1, 2, 3, 5, 8)),
        (bytes(21), False),
    ],
)
def test_experts_that_no_router_could_choose_are_a_wrong_answer(experts: bytes, is_right: bool) -> None:
    """The trainer would train others, or end with an index error that the log repeats at each resume."""
    limits = AnswerRules(VOCABULARY, experts=(16, 16), chosen=2)
    asked = AskedTokens(2, SAMPLING, 1, 0, 64)
    answer = Completion((5, 6, 7, 8), (-0.5,) * 4, (0,) * 4, FinishReason.LENGTH, experts)
    if is_right:
        check_completions([answer], asked, limits)
    else:
        with pytest.raises(WrongAnswer, match="routing"):
            check_completions([answer], asked, limits)


@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ("token_ids", {"token_ids": (-3, 1, 1, 1)}),
        ("token_ids", {"token_ids": (2**70, 1, 1, 1)}),
        ("weight_versions", {"versions": (1_000_000,) * 4}),
        ("weight_versions", {"versions": (2**63 + 5,) * 4}),
        ("logprobs", {"logprobs": (-1e300,) * 4}),
        ("routing", {"routing": bytes(5)}),
        ("finish_reason", {"finish_reason": FinishReason.STOP}),
    ],
)
async def test_a_wrong_field_is_a_failure_of_the_engine_by_its_name(field: str, answer: dict[str, Any]) -> None:
    @dataclass
    class Lying(CountingEngine):
        async def generate(self, *arguments: Any, **named: Any) -> list[Completion]:
            return [replace(Completion((1,) * 4, (-0.5,) * 4, (0,) * 4, FinishReason.LENGTH), **answer)]

    told: list[str] = []
    pool = EnginePool(rules=rules(), initial=NOWHERE, patience_s=0.1, on_event=told.append)
    await pool.join("liar", Lying())
    with pytest.raises(EngineUnavailable, match=f"liar gave a wrong answer: {field}"):
        await pool.generate([1, 2], SAMPLING)
    assert "it rests" in told[0]
    await pool.join("honest", CountingEngine())
    assert (await pool.generate([1, 2], SAMPLING))[0].token_ids == true_answer([1, 2], 4)


STOPPED = Completion((5, STOP), (-0.5,) * 2, (0,) * 2, FinishReason.STOP)


@dataclass
class Answering(CountingEngine):
    """Gives the answer that a test sets, from a server of another project or from Shoal's own."""

    answer: Completion = STOPPED
    foreign: bool = False

    async def generate(self, *arguments: Any, n: int = 1, **named: Any) -> list[Completion]:
        return [self.answer] * n

    async def info(self) -> EngineInfo:
        return replace(await super().info(), foreign=self.foreign)


@pytest.mark.parametrize("ids", [(5,), (5, 6, 7), (5, 6, 7, 8)])
@pytest.mark.parametrize("why", [FinishReason.STOP, FinishReason.LENGTH])
async def test_a_foreign_server_may_end_an_answer_by_its_own_rules(ids: tuple[int, ...], why: FinishReason) -> None:
    pool = EnginePool(rules=rules(), initial=NOWHERE, patience_s=0.01)
    answer = Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), why)
    own, foreign = Answering(answer=answer), Answering(answer=answer, foreign=True)
    await pool.join("foreign", foreign)
    assert await pool.generate([1, 2], Sampling(4, stop_token_ids=(STOP,))) == [answer]
    wrong = [(STOP, *ids[1:], 5)[:4], (*ids[1:], VOCABULARY), ()]
    for tokens in wrong:
        foreign.answer = Completion(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), why)
        with pytest.raises(EngineUnavailable, match=r"token_ids|finish_reason"):
            await pool.generate([1, 2], Sampling(4, stop_token_ids=(STOP,)))
        ready_again(pool)
    await pool.leave("foreign")
    await pool.join("own", own)
    if why is FinishReason.STOP or len(ids) < 4:
        with pytest.raises(EngineUnavailable, match="finish_reason"):
            await pool.generate([1, 2], Sampling(4, stop_token_ids=(STOP,)))


def ready_again(pool: EnginePool) -> None:
    """Ends the rests of the replicas, as their time would."""
    for replica in pool.replicas:
        replica.rests_until_s, replica.state = 0.0, ReplicaState.READY


@pytest.mark.parametrize("between", [0, 99, 100])
async def test_only_an_engine_that_is_wrong_often_is_left_out(between: int) -> None:
    engine = Answering(version=1)
    right = replace(STOPPED, versions=(1, 1))
    pool = EnginePool(rules=rules(), patience_s=0.01, recovered=1)
    await pool.join("restarting", engine)
    (replica,) = pool.replicas
    for _ in range(4):
        engine.answer = replace(right, versions=(0, 0))  # of the weights that it had right after a restart
        with pytest.raises(EngineUnavailable, match="weight_versions"):
            await pool.generate([1, 2], SAMPLING)
        if replica.left_out:
            break
        ready_again(pool)
        engine.answer = right
        for _ in range(between):
            await pool.generate([1, 2], SAMPLING)
    assert replica.left_out == (between < 100)


async def test_answers_that_are_wrong_together_count_once() -> None:
    class Together(Answering):
        async def generate(self, *arguments: Any, **named: Any) -> list[Completion]:
            await barrier.wait()
            return await super().generate(*arguments, **named)

    barrier = asyncio.Barrier(8)

    lying = Together(answer=replace(STOPPED, versions=(7, 7)))
    pool = EnginePool(rules=rules(), initial=NOWHERE, patience_s=0.01)
    await pool.join("liar", lying)
    asked = (pool.generate([i], SAMPLING) for i in range(8))
    given = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, EngineUnavailable) for one in given)
    assert [replica.wrong for replica in pool.replicas] == [1]


def test_spans_of_versions_cost_no_more_than_the_answer_is_long() -> None:
    spans = [{"version": 2, "start": 0, "end": 3 * 10**9}]
    asyncio.run(answers_of([{"choices": [{**RIGHT, "weight_versions": spans}]}]))


def test_an_engine_that_fails_every_request_at_once_rests_while_others_answer() -> None:
    class Refusing(CountingEngine):
        async def generate(self, *arguments: Any, **named: Any) -> list[Completion]:
            self.served.append(0)
            raise RequestRefused("no")

    async def body(pool: EnginePool) -> None:
        for i in range(60):
            assert (await pool.generate([i], Sampling(3)))[0].token_ids == true_answer([i], 3)
        assert len(refusing.served) == 8
        assert [replica.state for replica in pool.replicas] == ["away", "ready"]

    refusing = Refusing()
    watched([refusing, CountingEngine()], body)


def test_an_engine_that_takes_weights_and_computes_with_others_serves_nothing(tmp_path: Path) -> None:
    canary.write(canary.Canary((1, 2, 3), (-2.5, -2.5), 0.1), tmp_path)
    told: list[str] = []

    async def run() -> None:
        pool = EnginePool(on_event=told.append, patience_s=5)
        await pool.join("stale", CountingEngine())
        honest = CountingEngine(logprob=-2.5)
        await pool.join("honest", honest)
        await pool.update_weights(1, tmp_path)
        assert [replica.state for replica in pool.replicas] == ["away", "ready"]
        assert "stale gave a wrong answer" in told[0]
        assert "computes with other weights" in told[0]
        rested, _ = pool.replicas
        rested.rests_until_s = 0.0
        await pool._check(rested)
        assert rested.state is ReplicaState.AWAY
        assert rested.wrong == 2

    asyncio.run(run())


async def test_an_engine_with_the_number_of_the_weights_and_others_of_an_ended_run_loads_them(tmp_path: Path) -> None:
    class Other(CountingEngine):
        async def update_weights(self, version: int, path: Path) -> None:
            await super().update_weights(version, path)
            self.logprob = -2.5

    canary.write(canary.Canary((1, 2, 3), (-2.5, -2.5), 0.1), tmp_path)
    pool = EnginePool(patience_s=5)
    await pool.join("own", CountingEngine(logprob=-2.5))
    await pool.update_weights(4, tmp_path)
    other = Other(version=4)
    await pool.join("other", other)
    assert other.served == [4]
    assert [replica.state for replica in pool.replicas] == ["ready", "ready"]


async def test_a_full_engine_may_take_longer_to_score_the_canary_than_to_say_that_it_lives(tmp_path: Path) -> None:
    class Full(CountingEngine):
        async def scored(self, *arguments: Any, **named: Any) -> ScoreResponse:
            await ended.wait()
            return await super().scored(*arguments, **named)

        async def alive(self) -> None:
            asked.append(1)
            if len(asked) > 5:
                ended.set()

    canary.write(canary.Canary((1, 2, 3), (-0.5, -0.5), 0.1), tmp_path)
    asked, ended = list[int](), asyncio.Event()
    pool = EnginePool(patience_s=5, check_every_s=0.005, check_timeout_s=0.01)
    await pool.join("full", Full())
    await pool.update_weights(1, tmp_path)
    assert [replica.last_error for replica in pool.replicas] == [""]


async def test_requests_that_every_engine_refuses_are_no_failures_of_the_engines() -> None:
    class Reading(CountingEngine):
        async def generate(self, prompt_ids: Sequence[int], *arguments: Any, **named: Any) -> list[Completion]:
            if prompt_ids[0] < 0:
                raise RequestRefused("token_ids")
            return await super().generate(prompt_ids, *arguments, **named)

    pool = EnginePool(patience_s=5)
    for name in ("one", "other"):
        await pool.join(name, Reading())
    for index in range(40):
        with pytest.raises(RequestRefused):
            await pool.generate([-1, index], Sampling(3))
    assert [replica.state for replica in pool.replicas] == ["ready", "ready"]


@pytest.mark.parametrize("ends", ["leaves", "stops answering"])
def test_an_engine_that_freezes_while_it_loads_holds_up_no_update(ends: str) -> None:
    async def body(pool: EnginePool) -> None:
        updating = asyncio.create_task(pool.update_weights(1, NOWHERE))
        await until(lambda: frozen.loads == [1])
        if ends == "leaves":
            frozen.silent_abort = True
            leaving = asyncio.create_task(pool.leave("0"))
            await updating
            await leaving
            assert frozen.closed
        else:
            frozen.dead = True
            await updating
            assert pool.replicas[0].state == "away"
        assert (await pool.generate([1], Sampling(2)))[0].versions == (1, 1)

    frozen = SilentEngine(silent_load=True)
    watched([frozen, CountingEngine()], body, check_timeout_s=0.2)


if __name__ == "__main__":
    # The suite's test, many times over.
    given(changed(RIGHT))(
        settings(max_examples=int(sys.argv[1]), deadline=None)(
            lambda choice: asyncio.run(answers_of([{"choices": [choice]}]))
        )
    )()
