"""Streams, OpenAI's completions and what comes with tokens, over real HTTP."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.crowd import crowd
from engine_server import PROMPT, Server, changed_weights, running, serving
from shoal.model.loading import load_model, packed_logprobs
from shoal.types import Sampling
from shoal.weights.store import WeightStore
from until import until


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[Server]:
    with serving(tiny_model_dir, "--max-running", "8", "--max-waiting", "16") as found:
        yield found


def events(server: Server, path: str, body: dict[str, object]) -> Iterator[dict[str, object]]:
    """The events of a stream as they come; the last must be `[DONE]`."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer:
            if line.strip() == b"data: [DONE]":
                return
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream broke off")


def test_a_stream_gives_the_tokens_of_the_whole_answer_as_they_are_drawn(server: Server) -> None:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 60, "seed": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 0, "top_p": 0.9},
    }
    _, whole = server.ask("/inference/v1/generate", body)
    found = list(events(server, "/inference/v1/generate", body))
    assert len(found) > 10
    assert found[-1]["usage"] == whole["usage"]
    assert found[-1]["prompt_logprobs"] == whole["prompt_logprobs"]
    for expected in whole["choices"]:
        parts = [c for event in found for c in event["choices"] if c["index"] == expected["index"]]
        assert [token for part in parts for token in part["token_ids"]] == expected["token_ids"]
        assert [row for part in parts for row in part["logprobs"]["content"]] == expected["logprobs"]["content"]
        assert [lp for part in parts for lp in part["token_log_kept"]] == expected["token_log_kept"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        ends = [(span["start"], span["end"]) for part in parts for span in part["weight_versions"]]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == 60


def test_a_streams_versions_change_where_the_weights_do(tiny_model_dir: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    paths = {version: changed_weights(tiny_model_dir, store, version) for version in (1, 2, 3)}
    with serving(tiny_model_dir) as server:
        spans = []
        pending = dict(paths)
        for event in events(
            server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 240}}
        ):
            spans += [span for choice in event["choices"] for span in choice["weight_versions"]]
            if pending and spans[-1]["end"] > 20 * (4 - len(pending)):
                version = min(pending)
                body = {"version": version, "path": str(pending.pop(version))}
                assert server.ask("/update_weights", body)[1]["version"] == version
        assert sorted({span["version"] for span in spans}) == [0, 1, 2, 3]
        assert [span["version"] for span in spans] == sorted(span["version"] for span in spans)
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 240


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 240}}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}),
    ],
)
def test_a_stream_on_kept_kv_says_how_old_it_is(
    path: str, body: dict[str, object], tiny_model_dir: Path, tmp_path: Path
) -> None:
    weights = changed_weights(tiny_model_dir, WeightStore(tmp_path), 1)
    with serving(tiny_model_dir, "--on-update", "keep") as server:
        spans = []
        for event in events(server, path, body):
            if not spans:
                server.ask("/update_weights", {"version": 1, "path": str(weights)})
            spans += [span for choice in event["choices"] for span in choice["weight_versions"]]
    assert {(span["version"], span.get("kv_version")) for span in spans} == {(0, None), (1, 0)}


def test_a_stream_that_is_left_ends_its_request(server: Server) -> None:
    async def ask() -> None:
        async with server.engine() as engine:
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 250, "n": 8}}
            left = events(server, "/inference/v1/generate", body)
            await asyncio.to_thread(next, left)
            left.close()
            await until(lambda: running(engine, 0))
            assert (await engine.info()).waiting == 0

    asyncio.run(ask())


def test_a_stream_that_cannot_begin_has_a_status(server: Server) -> None:
    body = {"token_ids": [], "sampling_params": {}, "stream": True}
    assert server.ask("/inference/v1/generate", body)[0] == 400
    full = {"token_ids": PROMPT, "sampling_params": {"n": 16, "max_tokens": 2}, "stream": True}
    assert server.ask("/pause?mode=wait", {})[0] == 200
    try:
        assert server.ask("/inference/v1/generate", full)[0] == 503
        assert server.ask("/v1/completions", {"prompt": "12"})[0] == 503
    finally:
        server.ask("/resume", {})


def test_prompt_logprobs_are_those_of_a_full_forward(server: Server, tiny_model_dir: Path) -> None:
    tokens = [5 + i % 90 for i in range(40)]
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 3}}
    _, answer = server.ask("/inference/v1/generate", body)
    first, *rows = answer["prompt_logprobs"]
    assert first is None
    assert [row[0]["token_id"] for row in rows] == tokens[1:]
    with torch.inference_mode():
        logp_T, _ = packed_logprobs(load_model(tiny_model_dir), torch.tensor(tokens), [40])
    assert [row[0]["logprob"] for row in rows] == pytest.approx(logp_T[1:].tolist(), abs=1e-4)
    assert all(len(row) == 4 and row[1]["logprob"] >= row[0]["logprob"] - 1e-6 for row in rows)
    status, answer = server.ask("/inference/v1/generate", {"token_ids": tokens, "sampling_params": {"logprobs": 21}})
    assert (status, answer["error"]["message"]) == (400, "logprobs: expected 0 to 20, got 21")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        yield client


def test_openais_client_completes_text(client: openai.OpenAI, server: Server, tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    asked = {"model": "tiny", "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 2}
    answer = client.completions.create(prompt="12+3=", **asked, extra_body={"return_token_ids": True})
    body = {
        "token_ids": tokenizer.encode("12+3="),
        "sampling_params": {
            "max_tokens": 20,
            "seed": 5,
            "n": 2,
            "logprobs": 2,
            "stop_token_ids": [tokenizer.eos_token_id],
        },
    }
    _, expected = server.ask("/inference/v1/generate", body)
    for got, choice in zip(answer.choices, expected["choices"], strict=True):
        assert got.token_ids == choice["token_ids"]
        assert got.prompt_token_ids == body["token_ids"]
        assert got.text == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert got.finish_reason == choice["finish_reason"]
        assert got.logprobs.token_logprobs == [row["logprob"] for row in choice["logprobs"]["content"]]
        assert [len(tops) for tops in got.logprobs.top_logprobs] == [2] * len(got.token_ids)
        assert got.logprobs.text_offset[:2] == [0, len(got.logprobs.tokens[0])]
    assert answer.usage.prompt_tokens == 5
    streamed = client.completions.create(prompt="12+3=", **asked, stream=True, stream_options={"include_usage": True})
    texts = ["", ""]
    for event in streamed:
        for part in event.choices:
            texts[part.index] += part.text
    assert texts == [choice.text for choice in answer.choices]
    assert event.usage == answer.usage


def test_completions_take_several_prompts_of_text_or_tokens(client: openai.OpenAI, tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0, "n": 1}
    by_text = client.completions.create(prompt=["ab", "cde"], **asked)
    by_tokens = client.completions.create(prompt=[tokenizer.encode("ab"), tokenizer.encode("cde")], **asked)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_tokens.choices]
    assert [choice.index for choice in by_text.choices] == [0, 1]
    alone = client.completions.create(prompt=tokenizer.encode("cde"), **asked)
    assert alone.choices[0].text == by_text.choices[1].text


def test_a_stop_text_ends_a_completion_and_is_left_out(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": "tiny", "prompt": "12+3=", "max_tokens": 200, "temperature": 1, "seed": 8}
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    for stop in (whole.text[20:23], whole.text[:9], whole.text[2:12]):
        cut = client.completions.create(**asked, stop=["never in it", stop], extra_body={"ignore_eos": True}).choices[0]
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"
        stream = client.completions.create(**asked, stop=stop, stream=True, extra_body={"ignore_eos": True})
        assert "".join(event.choices[0].text for event in stream if event.choices) == cut.text

    async def idle() -> None:
        async with server.engine() as engine:
            await until(lambda: running(engine, 0))

    asyncio.run(idle())


def test_echo_gives_the_prompt_and_its_logprobs(client: openai.OpenAI, server: Server, tiny_model_dir: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(tiny_model_dir).encode("12+3=")
    answer = client.completions.create(
        model="tiny", prompt="12+3=", max_tokens=3, temperature=0, echo=True, logprobs=1, seed=1
    )
    (choice,) = answer.choices
    assert choice.text.startswith("12+3=")
    assert choice.logprobs.tokens[:5] == ["1", "2", "+", "3", "="]
    assert choice.logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    assert choice.logprobs.token_logprobs[0] is None
    _, scores = server.ask("/score", {"token_ids": tokens})
    assert choice.logprobs.token_logprobs[1:5] == pytest.approx(scores["logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "prompt: expected text or token ids, got an empty list"),
        ({"prompt": [1, "a"]}, "got a mixture"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"best_of": 3}, "best_of: expected n = 1 or nothing, got 3"),
        ({"frequency_penalty": 1}, "frequency_penalty: expected 0"),
        ({"echo": True, "stream": True}, "echo: expected false with stream"),
        ({"prompt": "1" * 256}, "token_ids: expected 1 to 255 tokens, got 256"),
    ],
)
def test_a_wrong_completion_is_answered_with_400_and_names_the_field(
    server: Server, change: dict[str, object], words: str
) -> None:
    status, answer = server.ask("/v1/completions", {"prompt": "1", **change})
    assert status == 400
    assert words in answer["error"]["message"]


def test_1000_requests_at_once_are_answered_in_bounded_memory(tiny_model_dir: Path) -> None:
    prompts = [[5 + i % 90] * (1 + i % 40) for i in range(1000)]
    lengths = [1 + i % 24 for i in range(1000)]
    report = asyncio.run(crowd(tiny_model_dir, prompts, lengths))
    assert report["answered"] == 1000
    assert 0 < report["wait_p50_s"] <= report["wait_p99_s"] < 60
    assert report["memory_peak_megabytes"] < report["memory_idle_megabytes"] + 150


def test_a_failed_update_is_reported_and_the_old_weights_go_on(
    server: Server, tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def ask() -> None:
        async with server.engine() as engine:
            before = await engine.generate(PROMPT, Sampling(9, temperature=0))
            info = await engine.weight_info()
            bad = changed_weights(tiny_model_dir, WeightStore(tmp_path), 7)
            bad.write_bytes(bad.read_bytes()[:-4] + b"\0\0\0\1")
            status, answer = server.ask("/update_weights", {"version": 7, "path": str(bad)})
            assert (status, "expected checksum" in answer["error"]["message"]) == (400, True)
            after = await engine.weight_info()
            assert (after.version, after.checksum) == (info.version, info.checksum)
            assert after.failure.startswith("version 7: weights ")
            assert await engine.generate(PROMPT, Sampling(9, temperature=0)) == before

    asyncio.run(ask())
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as metrics:
        assert "shoal_engine_failed_updates_total 1.0" in metrics.read().decode()


def test_of_several_versions_pushed_at_once_the_newest_is_served(tiny_model_dir: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    paths = {version: changed_weights(tiny_model_dir, store, version) for version in range(1, 9)}

    async def ask(server: Server) -> None:
        async with server.engine() as engine:
            answering = asyncio.create_task(engine.generate(PROMPT, Sampling(200), n=4))
            await until(lambda: running(engine, 4))
            async with asyncio.TaskGroup() as tasks:
                for version in range(8, 0, -1):
                    tasks.create_task(asyncio.to_thread(push, server, version))
            assert (await engine.weight_info()).version == 8
            for completion in await answering:
                assert list(completion.versions) == sorted(completion.versions)

    def push(server: Server, version: int) -> None:
        status, answer = server.ask("/update_weights", {"version": version, "path": str(paths[version])})
        assert status == 400 or answer["version"] >= version

    with serving(tiny_model_dir) as server:
        asyncio.run(ask(server))
