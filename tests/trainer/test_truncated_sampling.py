"""Training under truncated sampling: the tokens that could be sampled are those among which the trainer computes."""

import math
from array import array
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shoal.engine.compute.batch import SamplingRows, sample
from shoal.engine.compute.options import EngineLimits, OnUpdate
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.pool.answers import AnswerRules, AskedTokens, check_completions
from shoal.errors import WrongAnswer
from shoal.model.loading import load_model
from shoal.model.packed import pass_outputs, trained_pass
from shoal.model.token_logprobs import Kept, logprobs_among
from shoal.trainer.advantage import rows
from shoal.types import Completion, FinishReason, Reward, Rollout, RolloutStatus, Sampling, Turn

TRUNCATIONS = [
    Sampling(1, temperature, top_p, top_k)
    for temperature in (0.7, 1.0)
    for top_p, top_k in ((1.0, 3), (0.6, 5), (0.9, 4))
]


def kept_by_definition(logits: list[float], sampling: Sampling) -> list[int]:
    """The most likely tokens up to `top_k`, and of these the fewest that have `top_p` of their probability."""
    weights = [math.exp(logit / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])[: sampling.top_k]
    whole, mass, kept = sum(weights[token] for token in order), 0.0, list[int]()
    for token in order:
        if mass < sampling.top_p * whole or not kept:
            kept.append(token)
        mass += weights[token]
    return kept


def logprob_by_definition(logits: list[float], token: int, kept: list[int], temperature: float) -> float:
    """log of the token's share of the probability of the kept ones, float64."""
    weights = {other: math.exp(logits[other] / temperature) for other in kept}
    return math.log(weights[token] / sum(weights.values()))


@pytest.mark.parametrize("sampling", TRUNCATIONS)
def test_the_engine_records_the_tokens_that_it_could_sample_and_their_logprobs(sampling: Sampling) -> None:
    logits_BV = torch.randn(200, 11, generator=torch.Generator().manual_seed(0)) * 2
    whole = [Sampling(1), Sampling(1, temperature=0.0)]
    settings = [sampling if row % 3 else whole[row % 2] for row in range(200)]
    drawn = SamplingRows(settings)
    token_B, logp_B = sample(logits_BV, drawn, torch.rand(200, generator=torch.Generator().manual_seed(1)))
    assert drawn.kept is not None
    for row, (token, logp, ids) in enumerate(zip(token_B.tolist(), logp_B.tolist(), drawn.kept, strict=True)):
        logits = logits_BV[row].tolist()
        expected = kept_by_definition(logits, sampling) if settings[row] is sampling else []
        assert sorted(ids) == sorted(expected)
        if expected:
            assert logp == pytest.approx(logprob_by_definition(logits, token, expected, sampling.temperature), abs=1e-5)


def test_rows_that_keep_more_tokens_than_the_engine_compares_at_first_are_recorded_whole() -> None:
    logits_BV = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)) / 10
    drawn = SamplingRows(
        [Sampling(1, top_k=3), Sampling(1, top_k=400), Sampling(1), Sampling(1, top_p=0.999, top_k=512)]
    )
    sample(logits_BV, drawn, torch.full((4,), 0.5))
    assert drawn.kept is not None
    expected = [
        kept_by_definition(logits_BV[row].tolist(), one)
        for row, one in ((0, Sampling(1, top_k=3)), (1, Sampling(1, top_k=400)))
    ]
    assert [set(ids) for ids in drawn.kept[:2]] == [set(ids) for ids in expected]
    assert drawn.kept[2] == []
    assert 256 < len(drawn.kept[3]) <= 512


def test_an_engine_records_one_set_for_each_token_of_each_truncated_answer_in_any_batch(tiny_model_dir: Path) -> None:
    limits = EngineLimits(max_model_len=64, max_running=4, chunk_tokens=16)
    served = StepEngine(load_model(tiny_model_dir), limits, on_update=OnUpdate.RECOMPUTE, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32")
    settings = [Sampling(9, 0.7, 0.9, 4), Sampling(12), Sampling(7, top_k=3), Sampling(5, 0.0), Sampling(6, top_p=0.5)]
    requests = [Request([3 + i, 4, 5, 6, 7], sampling, n=1 + i % 3) for i, sampling in enumerate(settings)]
    for request in requests:
        served.submit(request)
        served.step()
    while not served.idle:
        served.step()
    for draft in (draft for request in requests for draft in request.drafts):
        assert len(draft.kept) == (len(draft.sampled) if draft.sampling.records_kept else 0)
        tokens = torch.tensor([[*draft.prompt_ids, *draft.sampled]])
        logits_LV = model(tokens).logits[0, len(draft.prompt_ids) - 1 :]
        for place, ids in enumerate(draft.kept):
            logits = logits_LV[place].tolist()
            assert set(array("I", ids)) == set(kept_by_definition(logits, draft.sampling))
            expected = logprob_by_definition(
                logits, draft.sampled[place], list(array("I", ids)), draft.sampling.temperature
            )
            assert draft.logprobs[place] == pytest.approx(expected, abs=1e-4)


def gradient(logp_N: Tensor, logits_UV: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(logp_N.sum(), logits_UV)
    return found


def test_logprobs_and_gradients_among_the_kept_tokens_are_those_of_the_definition() -> None:
    logits_UV = (torch.randn(5, 9, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    places = [(0, 4, [4]), (0, 2, [2, 5, 8]), (3, 1, [0, 1, 2, 3]), (4, 7, []), (3, 1, [1, 6])]
    kept = Kept.of([array("I", ids).tobytes() for _, _, ids in places], "cpu")
    at_N, token_N = torch.tensor([p[0] for p in places]), torch.tensor([p[1] for p in places])
    found_N = logprobs_among(logits_UV, at_N, token_N, kept, 0.7)
    expected = [
        (logits_UV.double()[u] / 0.7)[ids].log_softmax(-1)[ids.index(token)]
        if ids
        else torch.zeros((), dtype=torch.float64)
        for u, token, ids in places
    ]
    torch.testing.assert_close(found_N.double(), torch.stack(expected), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        gradient(found_N, logits_UV), gradient(torch.stack(expected), logits_UV), atol=1e-5, rtol=1e-5
    )


def enumerated(logits: Tensor, sampling: Sampling) -> Iterator[tuple[int, list[int], float]]:
    """Each token that truncated sampling can draw, the kept ones, and its probability."""
    kept = kept_by_definition(logits.tolist(), sampling)
    for token in kept:
        yield token, kept, math.exp(logprob_by_definition(logits.tolist(), token, kept, sampling.temperature))


def test_the_policy_gradient_is_that_of_the_expected_reward_under_truncated_sampling() -> None:
    """Every answer of one token, weighed by its probability: without bias, as long as the set that sampled is fixed."""
    logits_V = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    reward, sampling = [1.0, 0.0, 0.5, 2.0, -1.0, 0.25, 0.0, 1.5], Sampling(1, top_p=0.8, top_k=5)
    kept = kept_by_definition(logits_V.tolist(), sampling)
    value = (logits_V[kept].softmax(-1) * torch.tensor([reward[token] for token in kept])).sum()
    (expected_V,) = torch.autograd.grad(value, logits_V)
    found_V = torch.zeros(8, dtype=torch.float64)
    for token, ids, probability in enumerated(logits_V.detach(), sampling):
        logits_1V = logits_V.detach().float()[None].requires_grad_()
        could = Kept.of([array("I", ids).tobytes()], "cpu")
        logp_N = logprobs_among(logits_1V, torch.tensor([0]), torch.tensor([token]), could, 1.0)
        found_V += probability * reward[token] * gradient(logp_N, logits_1V)[0].double()
    torch.testing.assert_close(found_V, expected_V, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("most_logits", "entropy"), list(product((1 << 20, 600), (None, "value", "gradient"))))
def test_a_packed_pass_computes_each_trained_token_among_its_own_kept_ones(
    most_logits: int, entropy: Literal["value", "gradient"] | None, tiny_model_dir: Path
) -> None:
    model, reference = load_model(tiny_model_dir), AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32")
    packed, at = [[3, 4, 5, 6], [3, 4, 9, 7, 8]], [2, 3, 6, 8]
    kept = [[5, 6], [], [9, 5, 11], [8]]
    coded = [array("I", ids).tobytes() for ids in kept]

    def logp(wanted: list[bytes] | None) -> Tensor:
        made = trained_pass(packed, at, model, kept=wanted, most_logits=most_logits)
        return pass_outputs(model, made, temperature=0.7, entropy=entropy).logp_N

    found_N, whole_N = logp(coded), logp(None)
    flat = [token for row in packed for token in row]
    logits_TV = torch.cat([reference(torch.tensor([row])).logits[0] for row in packed]).double() / 0.7
    expected_N = torch.stack(
        [
            logits_TV[i - 1][ids].log_softmax(-1)[ids.index(flat[i])]
            if ids
            else logits_TV[i - 1].log_softmax(-1)[flat[i]]
            for i, ids in zip(at, kept, strict=True)
        ]
    )
    torch.testing.assert_close(found_N.double(), expected_N, atol=1e-4, rtol=1e-4)
    assert found_N[1] == whole_N[1]
    found_N.sum().backward()
    expected_N.sum().backward()
    theirs = dict(reference.named_parameters())
    for name, ours in model.named_parameters():
        torch.testing.assert_close(ours.grad, theirs[name].grad, atol=1e-4, rtol=1e-3)


def test_a_row_has_the_kept_tokens_of_its_sampled_ones_and_none_elsewhere() -> None:
    first = Completion((7, 2), (-0.5, -0.1), (0, 0), FinishReason.STOP, kept=(b"aaaa", b"bbbb"))
    turns = (
        Turn((1, 3), first),
        Turn((9,), Completion((8,), (-0.5,), (1,), FinishReason.STOP, kept=(b"cccc",)), parent=0),
    )
    (row,) = rows(Rollout("r", (), turns, Reward(1.0), RolloutStatus.FINISHED), 1.0)
    assert row.kept == (b"", b"", b"aaaa", b"bbbb", b"", b"cccc")
    plain = Turn((1,), Completion((2,), (-0.5,), (0,), FinishReason.STOP))
    assert rows(Rollout("r", (), (plain,), Reward(1.0), RolloutStatus.FINISHED), 1.0)[0].kept == ()


@pytest.mark.parametrize("kept", [(), (b"",), (array("I", [6]).tobytes(),), (array("I", [5, 5]).tobytes(),), (b"abc",),
                                  (array("I", [5, 99]).tobytes(),), (array("I", range(5, 25)).tobytes(),)])  # fmt: skip
def test_an_answer_whose_kept_tokens_cannot_be_is_a_fault_of_its_engine(kept: tuple[bytes, ...]) -> None:
    asked = AskedTokens(3, Sampling(1, top_k=3), 1, 0, 100)
    right = Completion((5,), (-0.5,), (0,), FinishReason.LENGTH, kept=(array("I", [6, 5]).tobytes(),))
    rules = AnswerRules(vocab_size=50, kept=True)
    check_completions([right], asked, rules)
    wrong = Completion((5,), (-0.5,), (0,), FinishReason.LENGTH, kept=kept)
    with pytest.raises(WrongAnswer, match="kept: expected"):
        check_completions([wrong], asked, rules)


def test_a_continued_answer_keeps_what_both_of_its_parts_could_sample() -> None:
    one = Completion((5,), (-0.5,), (0,), FinishReason.ABORT, kept=(b"aaaa",))
    assert one.then(Completion((6,), (-0.5,), (1,), FinishReason.STOP, kept=(b"bbbb",))).kept == (b"aaaa", b"bbbb")


def test_tokens_are_recorded_only_where_few_can_be_sampled() -> None:
    recorded = [
        one.records_kept
        for one in (Sampling(1), Sampling(1, top_p=0.9), Sampling(1, top_k=513), Sampling(1, 0.0, top_k=4))
    ]
    assert not any(recorded)
    assert Sampling(1, top_k=512).records_kept
