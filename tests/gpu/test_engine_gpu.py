"""The engine on a CUDA device: the same code, the same tokens in float32, nearly the same logprobs in bfloat16."""

from pathlib import Path

import pytest
import torch

from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request, scoring
from shoal.engine.compute.step_engine import StepEngine
from shoal.model.loading import load_model
from shoal.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


def answers(directory: Path, *, dtype: str, device: str, reload: bool = False) -> tuple[list[list[int]], list[float]]:
    """Tokens and logprobs of greedy, seeded and truncated requests that run together."""
    engine = StepEngine(load_model(directory, dtype=dtype, device=device), EngineLimits(200, chunk_tokens=16))
    samplings = [Sampling(40, temperature=0), Sampling(30, seed=1), Sampling(30, seed=2, top_p=0.9, top_k=20)]
    requests = [Request([5 + i] * (9 + 8 * i), sampling, n=2) for i, sampling in enumerate(samplings)]
    for request in requests:
        engine.submit(request)
    step = 0
    while not engine.idle:
        if reload and step % 7 == 6 and engine.version < 5:
            engine.update(engine.slots.staged(engine.version + 1, directory, None))
        engine.step()
        step += 1
    drafts = [draft for request in requests for draft in request.drafts]
    return [draft.sampled for draft in drafts], [logp for draft in drafts for logp in draft.logprobs]


def test_float32_on_a_gpu_draws_what_a_cpu_draws(tiny_model_dir: Path) -> None:
    expected, logprobs = answers(tiny_model_dir, dtype="float32", device="cpu")
    tokens, found = answers(tiny_model_dir, dtype="float32", device="cuda")
    assert tokens == expected
    assert found == pytest.approx(logprobs, abs=1e-3)


def test_interruptions_change_nothing_on_a_gpu(tiny_model_dir: Path) -> None:
    whole, _ = answers(tiny_model_dir, dtype="float32", device="cuda")
    interrupted, _ = answers(tiny_model_dir, dtype="float32", device="cuda", reload=True)
    assert interrupted == whole


def test_bfloat16_scores_are_near_those_of_float32(tiny_model_dir: Path) -> None:
    tokens = [5 + i % 90 for i in range(100)]
    scores = []
    for dtype in ("float32", "bfloat16"):
        engine = StepEngine(load_model(tiny_model_dir, dtype=dtype, device="cuda"), EngineLimits(200, chunk_tokens=16))
        request = scoring(tokens)
        engine.submit(request)
        while not engine.idle:
            engine.step()
        scores.append(torch.tensor(request.drafts[0].scores))
    assert float((scores[0] - scores[1]).abs().mean()) < 0.05
