"""Decoding in bfloat16 on a CPU, by two products over the whole storage of many rows."""

from pathlib import Path

import pytest
import torch

from engine_models import plain, saved
from shoal.engine.compute import attention
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.model.loading import load_model
from shoal.types import Sampling

KINDS = {"Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 20}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 12])
def test_logprobs_of_decoded_rows_are_as_near_to_float32_as_rounding_lets_them(
    kind: str, rows: int, tmp_path: Path
) -> None:
    path = saved(kind, tmp_path, num_key_value_heads=2, **KINDS[kind])
    check(engine_of(path), path, rows)


def test_new_weights_are_those_that_are_multiplied(tmp_path: Path) -> None:
    """Products keep a second layout of the weights, which loading must renew."""
    first, second = (saved("Qwen3", tmp_path / str(seed), seed, num_key_value_heads=2) for seed in (0, 1))
    ours = engine_of(first)
    loaded = ours.update(ours.slots.staged(1, second, None))
    ours.step()
    assert loaded.result(0) == 1
    check(ours, second, rows=12)


def engine_of(path: Path) -> StepEngine:
    return StepEngine(load_model(path, dtype="bfloat16"), EngineLimits(max_model_len=96, max_running=16))


def check(ours: StepEngine, path: Path, rows: int) -> None:
    """Decodes some rows; transformers gives their tokens nearly the same logprobs in float32."""
    requests = [Request(list(range(5, 9 + 2 * row)), Sampling(max_tokens=30, seed=row)) for row in range(rows)]
    for request in requests:
        ours.submit(request)
    while not ours.idle:
        ours.step()
    exact, distances = plain(path), []
    for request in requests:
        draft = request.drafts[0]
        with torch.inference_mode():
            tokens = torch.tensor([*request.prompt_ids, *draft.sampled])
            logp_LV = exact(tokens[None]).logits[0].log_softmax(-1)
        wanted_L = logp_LV[len(request.prompt_ids) - 1 : -1].gather(-1, torch.tensor(draft.sampled)[:, None])[:, 0]
        distances.append((wanted_L - torch.tensor(draft.logprobs)).abs().mean())
    assert torch.stack(distances).mean() < 0.02
    assert torch.stack(distances).max() < 0.05


def test_few_rows_and_long_storage_go_to_flash_attention() -> None:
    def by_hand(rows: int, capacity: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return attention._by_hand(torch.zeros(rows, 2, capacity, 16, dtype=dtype), 40)

    assert by_hand(8, 64)
    assert not by_hand(7, 64)
    assert not by_hand(8, 128), "twice the longest row at most"
    assert not by_hand(8, 64, torch.float32)
