"""What vLLM says of the tokens that it samples: which could be sampled, and by which experts."""

import asyncio
import io
import json
from array import array
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest

from engine_models import saved
from shoal.engine.external.server_adapter import Asked, SampledCompletion
from shoal.engine.external.vllm import GENERATE, NO_LOGPROB, VLLM
from shoal.errors import EngineUnavailable, WrongAnswer
from shoal.model.file_sizes import router_experts
from shoal.model.loading import load_model
from shoal.model.routing import Routing, routers_of
from shoal.types import Sampling
from stub_server import Stub, stubbed

ASKED = Asked("a", (4, 5, 6), Sampling(2, top_k=2))
VOCABULARY = 100


def sampled(tops: list[dict[int, float]], routers: dict[int, int] | None = None, **more: object) -> SampledCompletion:
    """The completion that the adapter makes of an answer with some likely tokens; the first of each was sampled."""
    content = [
        {
            "token_id": next(iter(each)),
            "logprob": next(iter(each.values())),
            "top_logprobs": [{"token_id": token, "logprob": logprob} for token, logprob in each.items()],
        }
        for each in tops
    ]
    ids = [one["token_id"] for one in content]
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}, **more}

    async def run() -> SampledCompletion:
        stub = Stub({GENERATE: (200, json.dumps({"choices": [choice]}).encode())})
        async with stubbed(stub) as url:
            adapter = VLLM(url, "", VOCABULARY, routers)
            try:
                return (await adapter.sample(ASKED))[0]
            finally:
                await adapter.aclose()

    return asyncio.run(run())


def told(experts: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return b64encode(file.getvalue()).decode()


def ids_of(kept: bytes) -> list[int]:
    return list(array("I", kept))


def test_likely_tokens_with_a_finite_logprob_are_those_that_could_be_sampled() -> None:
    out = NO_LOGPROB
    one = sampled([{7: -0.5, 9: -1.0, 3: out}, {8: 0.0, 1: out}])
    assert [ids_of(kept) for kept in one.kept] == [[7, 9], [8]]
    assert one.routing == b""


def test_a_set_that_may_be_cut_off_is_no_set() -> None:
    with pytest.raises(EngineUnavailable, match="could sample more than"):
        sampled([{7: -0.5, 9: -1.0, 3: -2.0}, {8: 0.0, 1: NO_LOGPROB}])
    whole = dict.fromkeys(range(VOCABULARY), -4.0)
    assert len(ids_of(sampled([whole]).kept[0])) == VOCABULARY


def test_a_sampling_mask_goes_before_likely_tokens() -> None:
    one = sampled([{7: -0.5}, {8: 0.0}], sampling_mask=[[9, 7], [8]])
    assert [ids_of(kept) for kept in one.kept] == [[9, 7], [8]]
    with pytest.raises(EngineUnavailable, match="1 sampling masks for 2 tokens"):
        sampled([{7: -0.5}, {8: 0.0}], sampling_mask=[[9, 7]])


@pytest.mark.parametrize("experts", [255, 256])
def test_experts_are_stored_as_the_trainer_reads_them(experts: int) -> None:
    """vLLM stores 256 experts in a byte; the trainer needs one number more."""
    rows_PLk = np.random.default_rng(0).integers(0, experts, (4, 3, 2), np.uint8)
    one = sampled(
        [{7: -0.5, 3: NO_LOGPROB}, {8: 0.0, 3: NO_LOGPROB}], {1: experts, 2: experts}, routed_experts=told(rows_PLk)
    )
    width = 1 if experts == 255 else 2
    assert len(one.routing) == 4 * 2 * 2 * width
    read = np.frombuffer(one.routing, f"<u{width}").reshape(4, 2, 2)
    assert (read == rows_PLk[:, 1:]).all()


def test_experts_that_cannot_be_are_refused() -> None:
    tops = [{7: -0.5, 3: NO_LOGPROB}, {8: 0.0, 3: NO_LOGPROB}]
    with pytest.raises(WrongAnswer, match=r"integers \[4, layers, k\], got uint8 \(3, 1, 2\)"):
        sampled(tops, {0: 4}, routed_experts=told(np.zeros((3, 1, 2), np.uint8)))
    for wrong in (told(np.zeros((4, 1, 2), np.uint8)), told(np.array([None])), b64encode(b"no file").decode()):
        with pytest.raises(WrongAnswer, match="routed_experts"):
            sampled(tops, {1: 4}, routed_experts=wrong)


def header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, experts=np.zeros((4, 1, 2)))
    return file.getvalue()


@pytest.mark.parametrize(
    "wrong",
    [
        *(told(np.full((4, 1, 2), value)) for value in (300, 2**40, np.nan, 1j, True)),
        *(told(np.zeros(shape, np.uint8)) for shape in ((4, 1), (4, 1, 2, 3), (4,))),
        *(b64encode(header(shape)).decode() for shape in ((1 << 50,), (1 << 40, 4, 2), (4, 1, 2))),
        *(
            b64encode(one).decode()
            for one in (archive(), b"PK\3\4" + bytes(40), b"\x93NUMPY\1\0\x10\0" + b"{(" * 8, b"")
        ),
    ],
)
def test_a_file_that_holds_no_experts_is_a_wrong_answer_and_nothing_else(wrong: str) -> None:
    """300 would be stored as 44, and what is raised otherwise ends the run."""
    tops = [{7: -0.5, 3: NO_LOGPROB}, {8: 0.0, 3: NO_LOGPROB}]
    with pytest.raises(WrongAnswer, match="routed_experts"):
        sampled(tops, {0: 4}, routed_experts=wrong)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 24, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
        ("Mixtral", {"num_local_experts": 6}),
        ("GptOss", {"num_local_experts": 6}),
        ("Qwen2Moe", {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}),
    ],
)
def test_routers_are_found_in_the_files_as_in_the_model(kind: str, settings: dict[str, object], tmp_path: Path) -> None:
    path = saved(kind, tmp_path, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8, **settings)
    found, model = router_experts(path), load_model(path)
    assert len(found) == len(routers_of(model))
    assert set(found.values()) == {6}
    assert np.dtype(np.min_scalar_type(6)).itemsize == Routing(model).dtype.itemsize
    if kind == "Qwen3Moe":
        assert sorted(found) == [0, 2]
