"""New weights over real HTTP: which are served, on what KV, from where, and who may push them."""

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.crowd import crowd
from engine_server import PROMPT, Server, changed_weights, running, threaded
from shoal.types import Sampling
from shoal.weights.store import WeightStore
from until import until


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[Server]:
    with threaded(tiny_model_dir, "--max-running", "8", "--max-waiting", "16") as found:
        yield found


def test_tokens_on_kept_kv_have_the_version_that_sampled_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    weights = changed_weights(tiny_model_dir, WeightStore(tmp_path), 1)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 240}}
    with threaded(tiny_model_dir, "--on-update", "keep") as server:

        async def ask() -> list[dict[str, int]]:
            async with server.engine() as engine:
                answering = asyncio.create_task(asyncio.to_thread(server.ask, "/inference/v1/generate", body))
                await until(lambda: running(engine, 1))
                await engine.update_weights(1, weights)
            return (await answering)[1]["choices"][0]["weight_versions"]

        spans = asyncio.run(ask())
    assert [span["version"] for span in spans] == [0, 1]


@pytest.mark.parametrize("path", ["/pause", "/resume", "/abort_requests", "/update_weights", "/inference/v1/generate"])
@pytest.mark.parametrize("token", ["", "another"])
def test_who_has_not_the_token_changes_and_draws_nothing(server: Server, path: str, token: str) -> None:
    stranger = Server(server.url, server.pid, token)
    assert stranger.ask(path, {})[0] == 401
    assert stranger.ask("/info")[0] == 401
    assert stranger.ask("/health") == (200, {"status": "ok"})
    assert server.ask("/is_paused") == (200, {"is_paused": False})


def test_weights_are_regular_files_below_known_folders(tiny_model_dir: Path, tmp_path: Path) -> None:
    known, elsewhere = tmp_path / "known", tmp_path / "elsewhere"
    inside = changed_weights(tiny_model_dir, WeightStore(known), 1)
    outside = changed_weights(tiny_model_dir, WeightStore(elsewhere), 2)
    (known / "link").symlink_to(outside)
    os.mkfifo(known / "pipe")
    with threaded(tiny_model_dir, weights=known) as server:
        paths = [(outside, "below"), (known / "link", "below"), (known / "pipe", "regular"), ("/dev/zero", "below")]
        paths += [(known / ".." / "elsewhere" / outside.name, "below"), (known / "none", "cannot be read")]
        for path, words in paths:
            status, answer = server.ask("/update_weights", {"version": 2, "path": str(path)})
            assert (status, words in answer["error"]["message"]) == (400, True), answer
        assert server.ask("/update_weights", {"version": 1, "path": str(inside)})[1]["version"] == 1


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
            info = await engine.info()
            bad = changed_weights(tiny_model_dir, WeightStore(tmp_path), 7)
            bad.write_bytes(bad.read_bytes()[:-4] + b"\0\0\0\1")
            status, answer = server.ask("/update_weights", {"version": 7, "path": str(bad)})
            assert (status, "expected checksum" in answer["error"]["message"]) == (400, True)
            _, after = server.ask("/weight_info")
            assert (after["version"], after["checksum"]) == (info.version, info.checksum)
            assert str(after["failure"]).startswith("version 7: weights ")
            assert await engine.generate(PROMPT, Sampling(9, temperature=0)) == before

    asyncio.run(ask())
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as metrics:
        assert "shoal_engine_failed_updates_total 1\n" in metrics.read().decode()


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
            assert (await engine.info()).version == 8
            for completion in await answering:
                assert list(completion.versions) == sorted(completion.versions)

    def push(server: Server, version: int) -> None:
        status, answer = server.ask("/update_weights", {"version": version, "path": str(paths[version])})
        assert status == 400 or answer["version"] >= version

    with threaded(tiny_model_dir) as server:
        asyncio.run(ask(server))
