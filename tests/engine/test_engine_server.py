"""A real engine over real HTTP, in a process where that counts."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from engine_server import PROMPT, Server, changed_weights, running, serving, threaded, waiting
from environ import environment_of
from external_engine import more_drawn
from shoal.config import EngineConfig, ModelConfig
from shoal.engine.server.http_client import HttpEngine, engine_child
from shoal.engine.server.http_server import main
from shoal.engine.server.protocol import MAX_BODY_BYTES
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.files import checksum
from shoal.net.process import torch_environment
from shoal.types import Completion, FinishReason, Sampling
from shoal.weights.store import WeightStore
from until import alive, until

VOCABULARY = 102


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[Server]:
    with threaded(tiny_model_dir, "--max-running", "4", "--max-waiting", "8") as found:
        yield found


@pytest.fixture(scope="module")
def roomy(tiny_model_dir: Path) -> Iterator[Server]:
    """Another engine of the same model, whose weights are called version 2."""
    with threaded(tiny_model_dir, "--max-running", "32", "--version", "2") as found:
        yield found


def test_generation_has_the_shape_of_vllm(server: Server) -> None:
    status, answer = server.ask(
        "/inference/v1/generate",
        {
            "request_id": "mine",
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 5, "temperature": 0.7, "n": 2, "seed": 1, "logprobs": 0},
        },
    )
    assert status == 200
    assert answer["request_id"] == "mine"
    assert len(answer["choices"]) == 2
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 5}]
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])


async def test_the_client_gets_what_the_routes_give(server: Server) -> None:
    async with server.engine() as engine:
        completions = await engine.generate(PROMPT, Sampling(12, seed=3, top_p=0.9), n=3)
        assert [len(completion.token_ids) for completion in completions] == [12] * 3
        again = await engine.generate(PROMPT, Sampling(12, seed=3, top_p=0.9), n=3)
        assert [c.token_ids for c in again] == [c.token_ids for c in completions]
        (whole,) = await engine.generate(PROMPT, Sampling(12))
        scores = (await engine.scored([*PROMPT, *whole.token_ids])).logprobs
        assert scores[len(PROMPT) - 1 :] == pytest.approx(whole.logprobs, abs=1e-4)
        info = await engine.info()
        assert (info.version, info.running, info.waiting) == (0, 0, 0)
        assert info.tokens_drawn >= 84
        assert 0 < info.busy_share <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": []}, "token_ids: expected 1 to 255 tokens, got 0"),
        ({"token_ids": [5] * 256}, "token_ids: expected 1 to 255 tokens, got 256"),
        ({"token_ids": [5, VOCABULARY]}, f"token_ids: expected ids from 0 to {VOCABULARY - 1}"),
        ({"token_ids": [-1]}, "token_ids: expected ids from 0"),
        ({"token_ids": "abc"}, "Expected `array`, got `str` - at `$.token_ids`"),
        ({"token_ids": None}, "Expected `array`, got `null` - at `$.token_ids`"),
        ({"tokens": [1]}, "unknown field `tokens`"),
        ({"stream": 1}, "$.stream"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens: expected at least 1, got 0"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"sampling_params": {"min_p": 1}}, "sampling_params.min_p"),
        ({"sampling_params": {"n": 0}}, "n: expected 1 to 8, got 0"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "unknown field `repetition_penalty`"),
        ({"sampling_params": {"seed": "x"}}, "$.sampling_params.seed"),
    ],
)
def test_a_wrong_request_is_answered_with_400_and_names_the_field(
    server: Server, change: dict[str, object], words: str
) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}, **change}
    status, answer = server.ask("/inference/v1/generate", body)
    assert status == 400
    assert words in answer["error"]["message"]


def test_other_wrong_bodies_and_routes_are_refused(server: Server) -> None:
    assert server.ask("/inference/v1/generate", raw=b"{")[0] == 400
    assert server.ask("/score", raw=b'{"token_ids": ' + b"[" * 15_000)[0] == 400
    assert server.ask("/inference/v1/generate", raw=b" " * (MAX_BODY_BYTES + 1))[0] == 413
    assert server.ask("/nowhere")[0] == 404
    assert server.ask("/inference/v1/generate")[0] == 405
    assert server.ask("/pause?mode=never", {})[0] == 400
    assert server.ask("/score", {"token_ids": [VOCABULARY]})[0] == 400


async def test_max_tokens_beyond_the_context_are_cut_to_what_fits(server: Server) -> None:
    async with server.engine() as engine:
        (completion,) = await engine.generate([5] * 250, Sampling(1000))
        assert len(completion.token_ids) == 6
        assert completion.finish_reason is FinishReason.LENGTH
        with pytest.raises(RequestRefused, match="255 tokens, got 256"):
            await engine.generate([5] * 256, Sampling(1))


async def test_a_full_queue_answers_503(server: Server) -> None:
    async with server.engine() as engine:
        first = asyncio.create_task(engine.generate(PROMPT, Sampling(250), n=8))
        await until(lambda: running(engine, 4))
        second = asyncio.create_task(engine.generate(PROMPT, Sampling(250), n=4))
        await until(lambda: waiting(engine, 8))
        with pytest.raises(EngineUnavailable, match="the queue is full: 8 sequences wait"):
            await engine.generate(PROMPT, Sampling(1))
        await engine.abort()
        assert len(await first) == 8
        assert len(await second) == 4


async def test_pausing_keeps_waits_or_aborts_over_http(server: Server) -> None:
    async with server.engine() as engine:
        sampling = Sampling(200, temperature=0)
        (expected,) = await engine.generate(PROMPT, sampling)
        kept = asyncio.create_task(engine.generate(PROMPT, sampling))
        await until(lambda: running(engine, 1))
        await engine.pause("keep")
        assert await engine.paused()
        drawn = (await engine.info()).tokens_drawn
        queued = asyncio.create_task(engine.generate(PROMPT, sampling))
        await until(lambda: waiting(engine, 1))
        assert (await engine.info()).tokens_drawn == drawn
        await engine.resume()
        assert (await kept)[0].token_ids == (await queued)[0].token_ids == expected.token_ids

        finishing = asyncio.create_task(engine.generate(PROMPT, sampling))
        await until(lambda: running(engine, 1))
        await engine.pause("wait")
        assert finishing.done() or await finishing
        with pytest.raises(EngineUnavailable, match="paused"):
            await engine.generate(PROMPT, sampling)
        await engine.resume()

        aborted = asyncio.create_task(engine.generate(PROMPT, Sampling(250, temperature=0)))
        await until(lambda: running(engine, 1))
        await engine.pause("abort")
        (partial,) = await aborted
        assert partial.finish_reason is FinishReason.ABORT
        assert partial.token_ids == expected.token_ids[: len(partial.token_ids)]
        await engine.resume()
        assert not await engine.paused()


async def test_a_client_that_goes_away_takes_its_request_with_it(server: Server) -> None:
    async with server.engine() as engine:
        gone = asyncio.create_task(engine.generate(PROMPT, Sampling(250), n=8))
        await until(lambda: running(engine, 4))
        gone.cancel()
        before = (await engine.info()).tokens_drawn
        await until(lambda: running(engine, 0))
        info = await engine.info()
        assert info.waiting == 0
        assert info.tokens_drawn - before < 4 * 250


async def test_hundreds_of_requests_at_once_are_all_answered(roomy: Server) -> None:
    async with roomy.engine() as engine, asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(engine.generate([i % 90 + 6] * (1 + i % 9), Sampling(1 + i % 13), n=1 + i % 3))
            for i in range(300)
        ]
    for i, task in enumerate(asked):
        assert [len(completion.token_ids) for completion in task.result()] == [1 + i % 13] * (1 + i % 3)


def test_weights_change_under_requests_in_flight(
    server: Server, roomy: Server, tiny_model_dir: Path, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path)
    paths = {version: changed_weights(tiny_model_dir, store, version, factor=1.0) for version in (4, 5)}

    async def ask(server: Server) -> list[Completion]:
        async with server.engine() as engine:
            answering = asyncio.create_task(engine.generate(PROMPT, Sampling(240, seed=4), n=3))
            await until(lambda: running(engine, 3))
            for version, path in paths.items():
                await engine.update_weights(version, path)
                assert (await engine.info()).checksum == checksum(path)
            completions = await answering
            bad = changed_weights(tiny_model_dir, store, 6)
            bad.write_bytes(bad.read_bytes()[:-4] + b"\0\0\0\1")
            with pytest.raises(RequestRefused, match="expected checksum"):
                await engine.update_weights(6, bad)
            with pytest.raises(RequestRefused, match="no older one, got 3"):
                await engine.update_weights(3, changed_weights(tiny_model_dir, store, 3))
            info = await engine.info()
            assert (info.version, info.interruptions) == (5, 2)
            assert await engine.generate(PROMPT, Sampling(3))
            return completions

    completions = asyncio.run(ask(roomy))
    for completion in completions:
        assert completion.versions[0] == 2
        assert completion.versions[-1] == 5
    expected = asyncio.run(seeded(server))  # of the same weights, and never interrupted
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


async def seeded(server: Server) -> list[Completion]:
    async with server.engine() as engine:
        return await engine.generate(PROMPT, Sampling(240, seed=4), n=3)


def test_metrics_are_in_prometheus_format(server: Server) -> None:
    asyncio.run(seeded(server))
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    assert values["shoal_engine_tokens_drawn_total"] > 0
    assert values["shoal_engine_version"] == 0
    assert values["shoal_engine_running"] == 0
    assert server.ask("/health") == (200, {"status": "ok"})


def test_every_token_but_the_first_has_a_score_whatever_chunks_they_are_prefilled_in(tiny_model_dir: Path) -> None:
    async def ask(server: Server) -> None:
        async with server.engine() as engine:
            for length in range(1, 12):
                assert len((await engine.scored([5 + i for i in range(length)])).logprobs) == length - 1

    with threaded(tiny_model_dir, "--chunk-tokens", "4") as server:
        asyncio.run(ask(server))


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    async with aclosing(HttpEngine("http://127.0.0.1:9")) as engine:
        with pytest.raises(EngineUnavailable, match=r"no answer from http://127\.0\.0\.1:9"):
            await engine.info()


def test_an_engine_that_dies_makes_its_requests_unavailable(tiny_model_dir: Path) -> None:
    async def ask(server: Server) -> None:
        async with server.engine() as engine:
            answering = asyncio.create_task(engine.generate(PROMPT, Sampling(250), n=64))
            await until(lambda: running(engine, 64))
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailable, match="no answer from"):
                await answering

    with serving(tiny_model_dir, "--max-running", "64") as server:
        asyncio.run(ask(server))


def test_a_process_hides_its_token_and_gives_what_it_has_drawn_when_it_is_told_to_stop(tiny_model_dir: Path) -> None:
    async def ask(server: Server) -> None:
        async with server.engine() as engine:
            answering = asyncio.create_task(engine.generate(PROMPT, Sampling(250), n=256))
            await more_drawn(engine, 512, [answering])
            os.kill(server.pid, signal.SIGTERM)
            partial = await answering
            assert {completion.finish_reason for completion in partial} == {FinishReason.ABORT}
            assert sum(len(completion.token_ids) for completion in partial) >= 512

    with serving(tiny_model_dir, "--max-running", "256") as server:
        for place in ("cmdline", "environ"):
            assert server.token.encode() not in Path(f"/proc/{server.pid}/{place}").read_bytes()
        asyncio.run(ask(server))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked to do it, on Linux only")
def test_the_engine_dies_with_a_parent_that_is_killed(tiny_model_dir: Path, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_model_dir), str(tmp_path / "engine.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait(10)
    deadline_s = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < deadline_s, "the engine outlived its parent"
        time.sleep(0.02)


PARENT = """
import asyncio, sys
from contextlib import aclosing
from pathlib import Path
from shoal.config import EngineConfig, ModelConfig
from shoal.engine.server.http_client import engine_child

async def main():
    model, log = map(Path, sys.argv[1:])
    async with engine_child(model, EngineConfig(), ModelConfig(), max_model_len=64, threads=1, log=log) as child:
        async with aclosing(await child.serving(60)) as engine:
            await engine.pause()
        print(child.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_engine_is_started_with_room_for_more_compiled_products_than_other_processes(tmp_path: Path) -> None:
    async def capacity() -> str:
        log = tmp_path / "engine.log"
        child = engine_child(tmp_path, EngineConfig(), ModelConfig(), max_model_len=64, threads=1, log=log)
        async with child:
            return environment_of(child.pid)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]

    assert int(asyncio.run(capacity())) > int(torch_environment(1)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "model '/nowhere' cannot be loaded"),
        (["--kv-tokens", "100"], "kv_tokens: expected room for max_model_len = 256 tokens, got 100"),
        (["--max-model-len", "100000"], "max_model_len: expected at most the 256 tokens of the model, got 100000"),
        (["--host", "203.0.113.1"], "host: expected an address of this machine, got 203.0.113.1"),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_exit_code_2(
    tiny_model_dir: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tiny_model_dir), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_the_client_loads_no_torch() -> None:
    code = "import sys, shoal.engine.server.http_client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
