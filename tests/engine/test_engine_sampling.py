"""Sampling against its definition in float64: distribution, logprobs, independence of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.compute.batch import CANDIDATES, SamplingRows, sample
from shoal.engine.compute.request import Uniforms
from shoal.types import Sampling

samplings = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 300]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)


def distribution(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution a token is drawn from, in float64, step by step as the module's text says."""
    if sampling.temperature == 0:
        p_V = np.zeros(len(logits_V))
        p_V[int(logits_V.argmax())] = 1
        return p_V
    scaled_V = logits_V.astype(np.float64) / sampling.temperature
    p_V = np.exp(scaled_V - scaled_V.max())
    p_V /= p_V.sum()
    order = np.argsort(-p_V, kind="stable")
    kept = list(order[: sampling.top_k or None])
    p_V = np.where(np.isin(np.arange(len(p_V)), kept), p_V, 0)
    p_V /= p_V.sum()
    if sampling.top_p < 1:
        mass, nucleus = 0.0, []
        for token in kept:
            if mass >= sampling.top_p:
                break
            nucleus.append(token)
            mass += p_V[token]
        p_V = np.where(np.isin(np.arange(len(p_V)), nucleus), p_V, 0)
        p_V /= p_V.sum()
    p_V = np.where(p_V >= sampling.min_p * p_V.max(), p_V, 0)
    return p_V / p_V.sum()


def logits(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


@settings(max_examples=80)
@given(
    rows=st.lists(samplings, min_size=1, max_size=4),
    seed=st.integers(0, 50),
    vocabulary=st.sampled_from([2, 11, 104, 700]),
)
def test_tokens_follow_the_definition_with_its_logprobs(rows: list[Sampling], seed: int, vocabulary: int) -> None:
    logits_BV = logits(seed, len(rows), vocabulary)
    steps = 400
    u_N = (torch.arange(steps, dtype=torch.float32) + 0.5) / steps
    grid_BV = logits_BV.repeat_interleave(steps, 0)
    token_B, logp_B = sample(grid_BV, SamplingRows([s for s in rows for _ in range(steps)]), u_N.repeat(len(rows)))
    for i, sampling in enumerate(rows):
        expected_V = distribution(logits_BV[i].numpy(), sampling)
        token_N, logp_N = token_B[i * steps : (i + 1) * steps].numpy(), logp_B[i * steps : (i + 1) * steps].numpy()
        counts_V = np.bincount(token_N, minlength=vocabulary)
        assert (counts_V[expected_V == 0] == 0).all(), "a token outside the kept set was drawn"
        # u on a grid of N: a token gets its share of the grid, one more or one less for each end of its interval
        assert np.abs(counts_V / steps - expected_V).max() <= 2 / steps
        if sampling.temperature > 0:
            np.testing.assert_allclose(logp_N, np.log(expected_V[token_N]), atol=2e-5)
        else:
            plain_V = logits_BV[i].double().log_softmax(-1).numpy()
            np.testing.assert_allclose(logp_N, plain_V[token_N], atol=2e-6)


@pytest.mark.parametrize(
    "sampling", [Sampling(1, top_p=0.95), Sampling(1, top_k=400, top_p=0.9), Sampling(1, min_p=0.01)]
)
def test_rows_that_keep_more_tokens_than_are_looked_at_first_follow_the_definition_too(sampling: Sampling) -> None:
    logits_BV = logits(3, 1, 700) * 0.2
    expected_V = distribution(logits_BV[0].numpy(), sampling)
    assert (expected_V > 0).sum() > CANDIDATES
    u_N = (torch.arange(4000, dtype=torch.float32) + 0.5) / 4000
    token_N, logp_N = sample(logits_BV.repeat(4000, 1), SamplingRows([sampling]), u_N)
    assert np.abs(np.bincount(token_N.numpy(), minlength=700) / 4000 - expected_V).max() <= 2 / 4000
    np.testing.assert_allclose(logp_N.numpy(), np.log(expected_V[token_N.numpy()]), atol=2e-5)


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, top_p=0.3), Sampling(1, top_k=2, temperature=0.5)])
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(sampling: Sampling) -> None:
    logits_BV = logits(0, 16, 104)
    u_B = torch.rand(16, generator=torch.Generator().manual_seed(1))
    others = [Sampling(1, temperature=0), Sampling(1, top_p=0.9), Sampling(1, min_p=0.2, temperature=2.0)]
    mixed = [sampling, *(others[i % 3] for i in range(15))]
    alone_token, alone_logp = sample(logits_BV[:1], SamplingRows([sampling]), u_B[:1])
    token_B, logp_B = sample(logits_BV, SamplingRows(mixed), u_B)
    assert token_B[0] == alone_token[0]
    assert logp_B[0].item() == pytest.approx(alone_logp[0].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "vocabulary"), [(1, 2, 4), (300, 301, 1000), (255, 768, 769), (9, 511, 1024)]
)
def test_the_ends_of_the_unit_interval_draw_tokens_that_can_be_drawn(first: int, second: int, vocabulary: int) -> None:
    logits_BV = torch.full((2, vocabulary), -math.inf)
    logits_BV[:, [first, second]] = 0.0
    u_B = torch.tensor([0.0, 1 - 2**-24])
    for sampling in (Sampling(1), Sampling(1, top_p=0.99)):
        token_B, logp_B = sample(logits_BV, SamplingRows([sampling] * 2), u_B)
        assert sorted(token_B.tolist()) == [first, second]  # equal probabilities have no order of their own
        assert logp_B.tolist() == pytest.approx([-math.log(2)] * 2)


def test_logprobs_are_never_above_zero_and_always_finite() -> None:
    logits_BV = torch.tensor([[80.0, 0.0, -90.0], [1.0, 1.0, 1.0]])
    for sampling in (Sampling(1), Sampling(1, temperature=0), Sampling(1, top_k=1)):
        _, logp_B = sample(logits_BV, SamplingRows([sampling] * 2), torch.tensor([0.999, 0.5]))
        assert bool((logp_B <= 0).all())
        assert bool(logp_B.isfinite().all())


def test_uniforms_are_a_function_of_seed_completion_and_position() -> None:
    stream = Uniforms(7, 1)
    forward = [stream[i] for i in range(200)]
    assert Uniforms(7, 1)[150] == forward[150]
    assert [stream[i] for i in (3, 150, 0)] == [forward[i] for i in (3, 150, 0)]
    assert Uniforms(7, 2)[0] != forward[0] != Uniforms(8, 1)[0]
    assert all(0 <= u < 1 for u in forward)
    assert 0.4 < sum(forward) / 200 < 0.6


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("vocabulary", [11, 700])
def test_a_row_that_is_not_finite_has_no_logprob_and_changes_no_other_row(vocabulary: int, wrong: float) -> None:
    rows = [Sampling(1), Sampling(1, top_k=3), Sampling(1, top_p=0.9), Sampling(1, temperature=0.0)]
    for sampling in rows:
        logits_BV, uniform_B = logits(1, 3, vocabulary), torch.tensor([0.1, 0.5, 0.9])
        expected_B, _ = sample(logits_BV, SamplingRows([Sampling(1), sampling, Sampling(1)]), uniform_B)
        logits_BV[1] = wrong
        token_B, logp_B = sample(logits_BV, SamplingRows([Sampling(1), sampling, Sampling(1)]), uniform_B)
        assert token_B[[0, 2]].tolist() == expected_B[[0, 2]].tolist()
        assert logp_B.isfinite().tolist() == [True, False, True]
        assert 0 <= token_B[1] < vocabulary
