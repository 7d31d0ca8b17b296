"""The engines of a run: those at URLs that come late, and are of no use."""

import asyncio
import json
from base64 import b64encode
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import JsonValue
from safetensors.numpy import save_file

from shoal.config import parse
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.server.http_client import EngineChild
from shoal.errors import ChildDied, ConfigError, EngineUnavailable
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.interfaces import EngineInfo
from shoal.net.listening import free_port
from shoal.observe.metrics import JsonlTracker, Trackers
from shoal.rehearsal.clock import run_virtual
from shoal.run.engines import START_TIMEOUT_S, OnEvent, RunEngines, engines
from shoal.run.machine.devices import Devices, Threads
from shoal.run.prepare import Prepared
from shoal.types import Sampling
from stub_server import Stub, stubbed
from until import until

SERVED = EngineInfo(0, "", 64, 0.5, 1, 1, 0, 1, 0)


def engine_stub() -> Stub:
    """A server that says what one of Shoal's engines says, whatever weights it is given."""
    taken = msgspec.json.encode({"version": 1, "checksum": ""})
    answers = {"/info": msgspec.json.encode(SERVED), "/health": b"{}", "/update_weights": taken}
    return Stub({path: (200, body) for path, body in answers.items()})


def pool_of(
    urls: list[str], directory: Path, on_event: OnEvent, ask_again_s: float = 0.01, **train: JsonValue
) -> AbstractAsyncContextManager[RunEngines]:
    """The engines at these URLs as the engines of a run."""
    config = parse({"tasks": [{"name": "gcd"}], "engine": {"urls": urls}, "train": train})
    renderer: Any = SimpleNamespace(stop_token_ids=())
    service: Any = None
    write_sizes(directory)
    prepared = Prepared(config, directory, renderer, service, 64, 8)
    return engines(prepared, on_event, ask_again_s=ask_again_s)


def write_sizes(directory: Path) -> None:
    sizes = {"num_attention_heads": 1, "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 97}
    sizes |= {"num_experts_per_tok": 2}
    (directory / "config.json").write_bytes(msgspec.json.encode(sizes))


def free_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("useless", ["is no engine", "refuses the weights"])
def test_a_late_server_of_no_use_is_said_once_and_joins_when_it_can(useless: str, tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> None:
        late_url = free_url()
        async with stubbed(engine_stub()) as url, pool_of([url, late_url], tmp_path, said.append) as kept:
            pool = kept.pool
            assert [f"no answer from {late_url}" in sentence for sentence in said] == [True]
            await pool.update_weights(1, tmp_path)
            late = Stub() if useless == "is no engine" else engine_stub()
            late.answers["/update_weights"] = (400, b"of another architecture")
            async with stubbed(late, int(late_url.rpartition(":")[2])):
                asked = "/v1/models" if useless == "is no engine" else "/update_weights"
                await until(lambda: late.asked.count(asked) > 2)
                assert [replica.name for replica in pool.replicas] == [url]
                late.answers = engine_stub().answers
                await until(lambda: len(pool.replicas) == 2)
                assert {replica.version for replica in pool.replicas} == {1}

    asyncio.run(run())
    assert len(said) == 2
    assert f"{'another server' if useless == 'is no engine' else 'of another architecture'}" in said[1]
    assert "cannot join" in said[1]


async def test_a_server_that_cannot_answer_yet_is_not_asked_again_at_once(tmp_path: Path) -> None:
    late = Stub({"/v1/models": (500, b"loading")})
    async with (
        stubbed(engine_stub()) as url,
        stubbed(late) as late_url,
        pool_of([url, late_url], tmp_path, print, ask_again_s=3600) as kept,
    ):
        for _ in range(20):  # which take some time
            await kept.pool.info()
    assert late.asked == ["/info", "/v1/models"]


def test_the_credentials_of_an_engine_s_url_are_in_no_event_and_in_no_error(tmp_path: Path) -> None:
    with closing(Trackers(JsonlTracker(tmp_path / "metrics.jsonl"))) as trackers:

        def lost(how: str) -> None:
            trackers.log_event("engine_lost", reason=how)

        async def run() -> None:
            late_url = free_url()
            secret = late_url.replace("//", "//me:secret@")
            with pytest.raises(ExceptionGroup) as caught:
                await pool_of([secret], tmp_path, lost).__aenter__()
            assert caught.group_contains(EngineUnavailable, match=r"no answer from http://\*\*\*@127")
            assert not caught.group_contains(EngineUnavailable, match="secret")
            late = stubbed(Stub(), int(late_url.rpartition(":")[2]))
            async with stubbed(engine_stub()) as url, pool_of([url, secret], tmp_path, lost), late:
                await until(lambda: "cannot join" in (tmp_path / "metrics.jsonl").read_text())

        asyncio.run(run())
    written = (tmp_path / "metrics.jsonl").read_text()
    assert "no answer from http://***@127" in written
    assert "http://***@127" in written.splitlines()[-1]
    assert "secret" not in written


@pytest.mark.parametrize("experts", [bytes(4), bytes(12), bytes([16] * 8)])
def test_experts_that_the_model_s_routers_could_not_choose_are_a_wrong_answer(experts: bytes, tmp_path: Path) -> None:
    """Two of 16 experts in one layer; the files have one layer more than the model."""
    gates = {f"model.layers.{layer}.mlp.gate.weight": np.zeros((16, 8), np.float32) for layer in (0, 1)}
    save_file(gates, tmp_path / "model.safetensors")
    said: list[str] = []
    logprobs = {"content": [{"token_id": token, "logprob": -0.5, "token": ""} for token in (5, 6)]}
    choice = {"index": 0, "token_ids": [5, 6], "finish_reason": "length", "logprobs": logprobs}
    choice["weight_versions"] = [{"version": 0, "start": 0, "end": 2}]

    def says(routing: bytes) -> tuple[int, bytes]:
        return 200, json.dumps({"choices": [{**choice, "routing": b64encode(routing).decode()}]}).encode()

    async def run() -> None:
        engine = engine_stub()
        engine.answers["/inference/v1/generate"] = says(right := bytes([15] * 8))
        async with stubbed(engine) as url, pool_of([url], tmp_path, said.append, router_replay=True) as kept:
            (one,) = await kept.pool.generate((1, 2, 3), Sampling(2))
            assert (one.routing, said) == (right, [])
            engine.answers["/inference/v1/generate"] = says(experts)
            asked = asyncio.create_task(kept.pool.generate((1, 2, 3), Sampling(2)))
            await until(lambda: bool(said))
            asked.cancel()

    asyncio.run(run())
    assert "gave a wrong answer: routing: expected" in said[0]


def test_a_server_of_no_use_at_the_start_ends_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            stubbed(Stub()) as useless,
            stubbed(engine_stub()) as url,
            pool_of([url, useless], tmp_path, lambda how: None),
        ):
            raise AssertionError("it began")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(ConfigError, match="another server")


async def test_an_engine_behind_a_proxy_that_lost_it_goes_away_and_comes_back(tmp_path: Path) -> None:
    stub = engine_stub()

    async with stubbed(stub) as url, pool_of([url], tmp_path, lambda how: None) as kept:
        pool = kept.pool
        answers, stub.answers = stub.answers, {}
        await until(lambda: pool.replicas[0].state == "away")
        stub.answers = answers
        await until(lambda: pool.replicas[0].state == "ready")


class Failing(RunEngines):
    """Keeper of an engine that starts once, and never again."""

    async def _life(self, name: str, ready: asyncio.Event) -> str:
        if ready.is_set():
            raise ChildDied(f"the {name} process did not start")
        ready.set()
        return f"the {name} process ended"


def test_an_engine_that_cannot_start_again_is_reported_and_ends_the_run() -> None:
    said: list[str] = []
    prepared: Any = SimpleNamespace()
    keeper = Failing(prepared, EnginePool(), said.append)
    with pytest.raises(ChildDied, match="did not start; it ended 3 times within 60 s"):
        asyncio.run(keeper.keep_own("engine", asyncio.Event()))
    assert said == ["the engine process ended", "the engine process did not start"]


class Silent(EngineChild):
    """An engine process that never says that it serves."""

    def __init__(self) -> None:
        """Starts nothing."""
        super().__init__("engine", "", (), None, {})

    async def _start(self) -> None:
        self._reader = asyncio.StreamReader()

    def send(self, frame: bytes) -> int:
        return 0

    async def end(self) -> None:
        pass


class Waiting(RunEngines):
    """Keeper of an engine that says nothing."""

    def _child(self, name: str) -> EngineChild:
        return Silent()


def test_an_engine_that_never_serves_is_waited_for_five_minutes() -> None:
    prepared: Any = SimpleNamespace()

    async def waited_s() -> float:
        with pytest.RaisesGroup(pytest.RaisesExc(ChildDied, match="the engine process was not ready in 300 s")):
            async with asyncio.TaskGroup() as tasks:
                keeper = Waiting(prepared, EnginePool(), print)
                tasks.create_task(keeper.keep_own("engine", asyncio.Event()))
                await asyncio.sleep(1)
                assert await keeper.helped() == ["engine is starting"]
        return asyncio.get_running_loop().time()

    assert START_TIMEOUT_S <= run_virtual(waited_s()) < START_TIMEOUT_S + 10


def test_an_engine_that_ends_in_its_first_start_ends_the_run(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    config = parse({"run_dir": str(tmp_path), "tasks": [{"name": "gcd"}]})
    parts = {"config": config, "model_dir": tmp_path, "max_model_len": 64, "devices": Devices()}
    parts |= {"threads": Threads(), "sampling": Sampling(1)}
    prepared: Any = SimpleNamespace(**parts)

    async def run() -> None:
        async with engines(prepared, lambda how: None):
            raise AssertionError("it began")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(ChildDied, match="the engine process ended")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, ADAPTER_FILE),
        ({"engine": {"urls": ["http://127.0.0.1:1"], "adapters": True}}, ADAPTER_FILE),
        ({"engine": {"urls": ["http://127.0.0.1:1"]}}, MODEL_FILE),
        ({"cluster": {"listen": "127.0.0.1:1"}}, MODEL_FILE),
        ({"train": {}}, MODEL_FILE),
    ],
)
def test_a_version_is_an_adapter_where_every_engine_has_its_base(settings: dict[str, object], name: str) -> None:
    config = parse({"tasks": [{"name": "gcd"}], "train": {"lora": {"rank": 2}}, **settings})
    nothing: Any = None
    assert Prepared(config, Path(), nothing, nothing, 64, 8, Devices(), "").version_file == name
