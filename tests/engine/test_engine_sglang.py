"""SGLang behind Shoal's protocol, against a server that follows its documented routes (sglang_contract.py)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine_server import changed_weights, threaded
from external_engine import (
    adapter_version,
    adapters_under_way,
    asked,
    assert_drawn_by_its_versions,
    logprobs,
    more_drawn,
)
from sglang_contract import contract
from shoal.engine.external.external_server import UNKNOWN, ForeignEngine
from shoal.engine.external.server_adapter import StopMode
from shoal.engine.pool import canary
from shoal.engine.pool.engine_pool import EnginePool
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.types import FinishReason, Sampling
from shoal.weights.store import WeightStore

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def files(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of versions 0, 1 and 2, with canaries."""
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    found = [tiny_model_dir / "model.safetensors"]
    for version, factor in ((1, -1.0), (2, 0.5)):
        path = changed_weights(tiny_model_dir, store, version, factor)
        row = tuple(range(6, 60))
        canary.write(canary.Canary(row, tuple(logprobs(tiny_model_dir, path, row)), 1e-3), path.parent)
        found.append(path)
    return found


@pytest.fixture(scope="module")
def engine_url(tiny_model_dir: Path) -> Iterator[str]:
    with threaded(tiny_model_dir) as server:
        yield server.url


def test_tokens_scores_and_weights_under_way_by_retracting(
    engine_url: str, tiny_model_dir: Path, files: list[Path]
) -> None:
    async def body(engine: ForeignEngine) -> None:
        assert engine.how is StopMode.KEEP_AND_RECOMPUTE
        tasks = [asyncio.create_task(engine.generate([*PROMPT, i], Sampling(240), n=4)) for i in range(8)]
        for version in (1, 2):
            await more_drawn(engine, 64, tasks)
            await engine.update_weights(version, files[version])
        answers = [completion for task in tasks for completion in await task]
        assert all(len(c.token_ids) == 240 for c in answers)
        assert max(len(set(c.versions)) for c in answers) > 1
        assert_drawn_by_its_versions(answers[5], [*PROMPT, 1], tiny_model_dir, files)
        row = [*PROMPT, *answers[0].token_ids[:20]]
        scored, computed = (await engine.scored(row)).logprobs, logprobs(tiny_model_dir, files[2], row)
        assert max(abs(a - b) for a, b in zip(scored, computed, strict=True)) < 1e-4
        info = await engine.info()
        assert (info.version, info.max_model_len, info.running) == (2, 256, 0)
        assert info.tokens_drawn >= 32 * 240
        with pytest.raises(RequestRefused, match="token_ids"):
            await engine.generate([10**6], Sampling(4))
        (stopped,) = await engine.generate(PROMPT, Sampling(200, stop_token_ids=tuple(range(40))))
        assert stopped.finish_reason is FinishReason.STOP

    with contract(engine_url) as (url, server):
        asked(url, tiny_model_dir, body, "recompute")
        bodies = [body for path, body in server.asked if path == "/update_weights_from_disk"]
        assert [(b["weight_version"], b["flush_cache"], b["abort_all_requests"]) for b in bodies] == [
            ("1", True, False),
            ("2", True, False),
        ]
        assert {b["mode"] for path, b in server.asked if path == "/pause_generation"} == {"probe", "retract"}
        renames = [body for path, body in server.asked if path == "/update_weight_version"]
        assert renames == [{"new_version": "0", "abort_all_requests": False}]


def test_in_place_requests_keep_their_kv_and_share_none_with_later_ones(
    tiny_model_dir: Path, files: list[Path]
) -> None:
    async def body(engine: ForeignEngine) -> None:
        assert engine.how is StopMode.KEEP
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(240), n=32))
        await more_drawn(engine, 64, [task])
        await engine.update_weights(1, files[1])
        assert any(set(answer.versions) == {0, 1} for answer in await task)
        await engine.generate(PROMPT, Sampling(2))

    with threaded(tiny_model_dir, "--on-update", "keep") as engine, contract(engine.url) as (url, server):
        asked(url, tiny_model_dir, body, "keep")
        salts = [b["extra_key"] for path, b in server.asked if path == "/generate" and "extra_key" in b]
        assert salts == ["v0", "v1"]


def test_versions_that_are_adapters_have_names_of_their_own_until_no_request_uses_them(
    engine_url: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def body(engine: ForeignEngine) -> None:
        await adapters_under_way(engine, PROMPT, tiny_model_dir, tmp_path)

    with contract(engine_url, label="7") as (url, server):
        server.adapters.append("of somebody else")
        asked(url, tiny_model_dir, body, "drain", adapters=True)
        assert [body["mode"] for path, body in server.asked if path == "/pause_generation"] == [
            "probe",
            "abort",
        ]  # for the model
        loaded = [body["lora_name"] for path, body in server.asked if path == "/load_lora_adapter"]
        assert [str(name).rpartition("-")[2] for name in loaded] == ["v1", "v2", "v3"]
        assert server.adapters == ["of somebody else", loaded[1]]
        server.adapters.clear()  # as a restart does

    async def restarted(engine: ForeignEngine) -> None:
        await engine.update_weights(1, adapter_version(tiny_model_dir, tmp_path, 4)[0])
        assert (await engine.info()).version == 1
        server.adapters.clear()
        assert (await engine.info()).version == UNKNOWN

    with contract(engine_url, label="8") as (url, server):
        asked(url, tiny_model_dir, restarted, "recompute", adapters=True)
        assert "/abort_request" in [path for path, _ in server.asked]


def test_an_older_server_is_aborted_and_the_pool_goes_on_with_the_partial_answers(
    engine_url: str, tiny_model_dir: Path, files: list[Path]
) -> None:
    async def body(engine: ForeignEngine) -> None:
        assert engine.how is StopMode.ABORT
        pool = EnginePool()
        await pool.join("sglang", engine)
        tasks = [asyncio.create_task(pool.generate([*PROMPT, i], Sampling(240), n=4)) for i in range(8)]
        for version in (1, 2):
            await more_drawn(engine, 64, tasks)
            await pool.update_weights(version, files[version])
        answers = [completion for task in tasks for completion in await task]
        assert all(len(c.token_ids) == 240 and c.finish_reason is FinishReason.LENGTH for c in answers)
        assert any(len(set(c.versions)) > 1 for c in answers)
        assert_drawn_by_its_versions(answers[1], [*PROMPT, 0], tiny_model_dir, files)

    with contract(engine_url, label="8", knows_modes=False) as (url, _):  # as another run left it
        asked(url, tiny_model_dir, body, "recompute")


def test_bad_weights_and_a_lying_server_are_noticed(
    engine_url: str, tiny_model_dir: Path, files: list[Path], tmp_path: Path
) -> None:
    async def body(engine: ForeignEngine) -> None:
        short = tmp_path / "short"
        short.mkdir()
        tensors = load_file(files[1])
        del tensors["lm_head.weight"]
        save_file(tensors, short / "model.safetensors")
        with pytest.raises(RequestRefused, match=r"did not take version 1|lm_head"):
            await engine.update_weights(1, short)
        lying = tmp_path / "lying"
        lying.mkdir()
        (lying / "model.safetensors").write_bytes(files[2].read_bytes())
        (lying / canary.FILE).write_bytes(files[1].with_name(canary.FILE).read_bytes())
        with pytest.raises(RequestRefused, match="computes with other weights"):
            await engine.update_weights(1, lying)
        with pytest.raises(EngineUnavailable, match="no whole weights"):
            await engine.generate(PROMPT, Sampling(2))
        await engine.update_weights(2, files[2])
        assert (await engine.generate(PROMPT, Sampling(2)))[0].versions == (2, 2)

    with contract(engine_url, label="9") as (url, _):
        asked(url, tiny_model_dir, body, "drain")
