"""Servers of other projects that lie: whatever they answer is an answer or an error of theirs."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from test_rogue_engine import changed

from shoal.engine.external.external_server import ForeignEngine
from shoal.engine.external.server_adapter import Abilities, HttpAdapter, StopMode
from shoal.engine.external.sglang import SGLang
from shoal.engine.external.vllm import GENERATE, NO_LOGPROB, VLLM
from shoal.errors import ConfigError, EngineError
from shoal.types import Sampling
from stub_server import Stub, stubbed

SPANS = [{"version": 0, "start": 0, "end": 2}]
TOPS = [{"token_id": token, "logprob": -0.5, "token": ""} for token in (1, 2)]
PLACES = [{**one, "top_logprobs": [*TOPS, {"token_id": 3, "logprob": NO_LOGPROB, "token": ""}]} for one in TOPS]
CHOICE: dict[str, Any] = {"index": 0, "token_ids": [1, 2], "finish_reason": "length", "weight_versions": SPANS}
SCORES = [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": -0.5}}]
VLLM_SAYS: dict[str, Any] = {
    GENERATE: {"choices": [{**CHOICE, "logprobs": {"content": PLACES}}], "prompt_logprobs": SCORES},
    "/weight_info": {"weight_version": "0"},
    "/v1/models": {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 64}]},
}
META = {"finish_reason": {"type": "length"}, "weight_versions": SPANS}
DRAWN = [[-0.5, 1, None], [-0.5, 2, None]]
LOGPROBS = {"output_token_logprobs": DRAWN, "input_token_logprobs": [[None, 1, ""], *DRAWN]}
SGLANG_SAYS: dict[str, Any] = {
    "/generate": {"meta_info": {**META, **LOGPROBS}},
    "/model_info": {"weight_version": "0"},
    "/v1/models": {"data": [{"id": "tiny", "owned_by": "sglang", "max_model_len": 64}]},
}


def one_choice(**changes: object) -> dict[str, object]:
    """What vLLM says, with another choice."""
    return {**VLLM_SAYS[GENERATE], "choices": [{**VLLM_SAYS[GENERATE]["choices"][0], **changes}]}


async def asked(kind: type[VLLM] | type[SGLang], says: dict[str, Any]) -> list[str]:
    """Errors of a server that says so, when it is asked in all ways."""
    async with stubbed(Stub({path: (200, json.dumps(one).encode()) for path, one in says.items()})) as url:
        adapter = kind(url, "", 50)
        engine, raised = ForeignEngine(adapter, "keep"), []
        engine.abilities, engine.how = Abilities("rogue", 64, True, True), StopMode.KEEP
        probed = Sampling(1, top_k=2)
        for doing in (
            engine.generate((1,), Sampling(2)),
            engine.generate((1,), Sampling(2, top_k=2)),
            engine.scored((1, 2, 3)),
            engine.info(),
            engine._probe_logprobs(probed),
            HttpAdapter.longest(adapter),
        ):
            try:
                await doing
            except (EngineError, ConfigError) as error:
                raised.append(str(error))
        await adapter.aclose()
        return raised


@pytest.mark.parametrize(
    ("path", "says", "why"),
    [
        (GENERATE, {"choices": [], "prompt_logprobs": SCORES}, "length"),
        (
            GENERATE,
            {**VLLM_SAYS[GENERATE], "prompt_logprobs": [None, {"9": {"logprob": -1}}, None]},
            "one of token '2'",
        ),
        (GENERATE, one_choice(sampling_mask=[[2**40], [1]]), "sampling_mask: expected tokens"),
        (GENERATE, one_choice(sampling_mask=[[-1], [1]]), "sampling_mask: expected tokens"),
        (GENERATE, one_choice(weight_versions=[{**SPANS[0], "version": "9" * 5000}]), "calls its weights"),
        ("/v1/models", {"data": []}, "length"),
    ],
)
async def test_an_answer_that_cannot_be_is_an_error_of_its_engine(path: str, says: object, why: str) -> None:
    assert why in " ".join(await asked(VLLM, {**VLLM_SAYS, path: says}))


@pytest.mark.parametrize("label", ["9" * 5000, "\u0663", "-1", "default"])
@pytest.mark.parametrize(("kind", "path"), [(VLLM, "/weight_info"), (SGLang, "/model_info")])
async def test_a_label_that_is_no_version_is_none(kind: type[VLLM] | type[SGLang], path: str, label: str) -> None:
    async with stubbed(Stub({path: (200, json.dumps({"weight_version": label}).encode())})) as url:
        adapter = kind(url)
        assert await adapter.version() is None
        await adapter.aclose()


@settings(max_examples=60, deadline=None)
@given(says=changed(VLLM_SAYS))
def test_whatever_vllm_answers_ends_no_run(says: Any) -> None:
    asyncio.run(asked(VLLM, says if isinstance(says, dict) else {}))


@settings(max_examples=60, deadline=None)
@given(says=changed(SGLANG_SAYS))
def test_whatever_sglang_answers_ends_no_run(says: Any) -> None:
    asyncio.run(asked(SGLang, says if isinstance(says, dict) else {}))
