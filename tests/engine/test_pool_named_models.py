"""A pool serves many models by name: adapters together, whole models in turns."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from test_engine_pool import CountingEngine, true_answer

from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import MOST_ADAPTERS, NamedModel, NumberedWeights
from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.types import Completion, Sampling
from until import until

BASE = Path("base")


@dataclass
class NamingEngine(CountingEngine):
    """Loads adapters by name, and notes with which weights it answers."""

    folder: Path = BASE
    """Whole model that it serves."""
    adapters: dict[str, int] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    answered: list[tuple[str, str]] = field(default_factory=list)
    """Whole model and adapter of each answer."""

    def note(self, adapter: str) -> None:
        if adapter and adapter not in self.adapters:
            raise RequestRefused(f"model: no adapter {adapter}")
        self.answered.append((self.folder.name, Path(adapter.partition("@")[0]).name))

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, adapter: str = ""
    ) -> list[Completion]:
        self.note(adapter)
        version = self.version if not adapter else self.adapters[adapter]
        answer = await super().generate(prompt_ids, sampling, n=n)
        return [replace(one, versions=(version,) * len(one.versions)) for one in answer]

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
    ) -> ScoreResponse:
        self.note(adapter)
        return await super().scored(token_ids, others)

    async def update_weights(self, version: int, path: Path) -> None:
        assert version > self.version
        await super().update_weights(version, path)
        self.folder = path

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        await asyncio.sleep(0)
        self.answering()
        self.loads.append(name)
        self.adapters[name] = version
        return dict(self.adapters)

    async def unload_adapter(self, name: str) -> dict[str, int]:
        del self.adapters[name]
        return dict(self.adapters)


async def pool_of(*engines: NamingEngine, turn_s: float = 60.0, patience_s: float = 60.0) -> EnginePool:
    pool = EnginePool(
        initial=BASE, numbers=NumberedWeights(), turn_s=turn_s, patience_s=patience_s, check_every_s=0.005
    )
    for i, engine in enumerate(engines):
        await pool.join(str(i), engine)
    return pool


def model_in(folder: Path, name: str, file: str = ADAPTER_FILE) -> NamedModel:
    (folder / name).mkdir()
    (folder / name / file).touch()
    return NamedModel.at(folder / name)


async def asked(pool: EnginePool, model: NamedModel, tokens: int = 3) -> tuple[int, ...]:
    (completion,) = await pool.generate([1, 2], Sampling(tokens), model=model)
    return completion.token_ids


def test_adapters_share_an_engine_which_loads_each_once(tmp_path: Path) -> None:
    engine = NamingEngine()
    one, two = model_in(tmp_path, "one"), model_in(tmp_path, "two")

    async def run() -> None:
        pool = await pool_of(engine)
        models = [one, two, one, NamedModel(), two]
        assert await asyncio.gather(*(asked(pool, model) for model in models)) == [true_answer([1, 2], 3)] * 5
        assert len((await pool.scored([1, 2, 3], model=two)).logprobs) == 2

    asyncio.run(run())
    assert sorted(engine.answered) == sorted([("base", name) for name in ("one", "two", "one", "", "two", "two")])
    assert sorted(engine.loads) == sorted([one.adapter, two.adapter])


def test_the_adapter_that_was_used_longest_ago_makes_room_and_one_in_use_stays(tmp_path: Path) -> None:
    engine = NamingEngine(adapters={"of an earlier server": 3})
    models = [model_in(tmp_path, str(number)) for number in range(MOST_ADAPTERS + 1)]

    async def run() -> None:
        pool = await pool_of(engine)
        engine.hangs = True
        held = asyncio.create_task(asked(pool, models[0]))
        await until(lambda: len(engine.answered) == 1)
        rest = [asyncio.create_task(asked(pool, model)) for model in models[1:]]
        await until(lambda: len(engine.answered) == MOST_ADAPTERS)
        assert models[-1].adapter not in engine.adapters, "all are in use"
        engine.hangs = False
        await asyncio.gather(held, *rest)
        assert len(engine.adapters) == MOST_ADAPTERS

    asyncio.run(run())
    assert "of an earlier server" not in engine.adapters


def test_whole_models_take_an_idle_engine_and_give_it_back(tmp_path: Path) -> None:
    engines = NamingEngine(), NamingEngine()
    one = model_in(tmp_path, "one", MODEL_FILE)

    async def run() -> None:
        pool = await pool_of(*engines)
        assert not pool.serves(one)
        for model in (NamedModel(), one, NamedModel(), one):
            assert await asked(pool, model) == true_answer([1, 2], 3)
        assert pool.serves(one)
        assert pool.serves(NamedModel())
        engines[0].dead = True
        for model in (one, NamedModel()):
            assert await asked(pool, model) == true_answer([1, 2], 3)

    asyncio.run(run())
    assert engines[1].answered[-2:] == [("one", ""), ("base", "")]


def test_a_request_for_other_weights_gets_its_turn_although_requests_keep_coming(tmp_path: Path) -> None:
    engine = NamingEngine()
    one = model_in(tmp_path, "one", MODEL_FILE)

    async def run() -> None:
        pool = await pool_of(engine, turn_s=0.0)
        engine.hangs = True
        first = asyncio.create_task(asked(pool, NamedModel()))
        await until(lambda: len(engine.answered) == 1)
        other = asyncio.create_task(asked(pool, one))
        await until(lambda: pool.waiting == 1)
        last = asyncio.create_task(asked(pool, NamedModel()))
        await until(lambda: pool.waiting == 2)
        engine.hangs = False
        await asyncio.gather(first, other, last)

    asyncio.run(run())
    assert engine.answered == [("base", ""), ("one", ""), ("base", "")]


def test_an_engine_with_unknown_weights_loads_the_base_before_it_answers(tmp_path: Path) -> None:
    engine = NamingEngine(version=7, folder=tmp_path)

    async def run() -> None:
        pool = await pool_of(engine)
        assert not pool.serves(NamedModel())
        await asked(pool, NamedModel())

    asyncio.run(run())
    assert engine.answered == [("base", "")]


def test_weights_that_an_engine_refuses_are_refused_and_the_base_goes_on(tmp_path: Path) -> None:
    engine = NamingEngine()
    one = model_in(tmp_path, "one", MODEL_FILE)

    async def run() -> None:
        pool = await pool_of(engine)
        engine.refuses = True
        with pytest.raises(RequestRefused, match="bad weights"):
            await asked(pool, one)
        engine.refuses = False
        await asked(pool, NamedModel())

    asyncio.run(run())
    assert engine.answered == [("base", "")]


def test_an_answer_of_an_adapter_continues_on_another_engine(tmp_path: Path) -> None:
    engines = NamingEngine(), NamingEngine()
    one = model_in(tmp_path, "one")

    async def run() -> None:
        pool = await pool_of(*engines)
        answers = [asyncio.create_task(asked(pool, one, 40)) for _ in range(4)]
        await until(lambda: all(engine.answered for engine in engines))
        await pool.leave("0")
        assert await asyncio.gather(*answers) == [true_answer([1, 2], 40)] * 4

    asyncio.run(run())
    assert {one for engine in engines for one in engine.answered} == {("base", "one")}


async def test_nothing_serves_named_models_for_longer_than_the_patience() -> None:
    with pytest.raises(EngineUnavailable, match="no engine for"):
        await asked(await pool_of(patience_s=0.01), NamedModel())
