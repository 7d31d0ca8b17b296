"""Attention with sinks, as GPT-OSS has it, in training and in decoding."""

import math
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from engine_models import plain, saved
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.model.attention import MOST_SCORES, Scores, by_definition
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.types import Sampling

SHAPE = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 5}
ROWS = ([5, 6, 7, 8, 9, 3, 4, 11, 12], [5, 6, 7, 20, 21], [40, 41, 42, 43, 44, 45, 46])


def test_gradients_of_all_weights_are_those_of_transformers_own_attention(tmp_path: Path) -> None:
    path = saved("GptOss", tmp_path, **SHAPE)
    theirs, ours = plain(path), load_model(path)
    tokens_T = torch.tensor([token for row in ROWS for token in row])
    packed_logprobs(ours, tokens_T, [len(row) for row in ROWS]).sum().backward()
    for row in ROWS:
        logp_LV = theirs(torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)
        logp_LV[range(len(row) - 1), row[1:]].sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-4)
    sinks = wanted["model.layers.0.self_attn.sinks"].grad
    assert sinks is not None
    assert sinks.abs().min() > 0


def test_answers_that_begin_in_turns_are_those_of_transformers_own_attention(tmp_path: Path) -> None:
    path = saved("GptOss", tmp_path, **SHAPE)
    engine, theirs = StepEngine(load_model(path), EngineLimits(max_model_len=64, max_running=3)), plain(path)
    generator = random.Random(0)
    prompts = [[generator.randrange(4, 97) for _ in range(length)] for length in (17, 3, 30, 9)]
    requests = [Request(prompt, Sampling(12, temperature=0)) for prompt in prompts]
    for step in count():
        if step < len(requests):
            engine.submit(requests[step])
        elif engine.idle:
            break
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        (draft,) = request.drafts
        logp_LV = theirs(torch.tensor([[*prompt, *draft.sampled]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert logp_LV.argmax(-1).tolist() == draft.sampled
        torch.testing.assert_close(torch.tensor(draft.logprobs), logp_LV.amax(-1), rtol=0, atol=1e-4)


def test_more_queries_than_are_computed_at_a_time_have_the_result_and_gradient_of_the_definition() -> None:
    torch.manual_seed(0)
    heads, length = 4, math.isqrt(MOST_SCORES // 4) + 9
    given = [torch.randn(1, n, length, 4) for n in (heads, 2, 2)] + [torch.randn(heads)]
    causal_LL = torch.ones(length, length).tril().bool()

    def defined(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        weight = (0.5 * q @ k.transpose(2, 3)).exp() * causal_LL
        return weight @ v / (weight.sum(-1, keepdim=True) + sinks_H.exp().view(1, heads, 1, 1))

    def computed(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in given]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    blocks = computed(lambda q, k, v, sinks_H: by_definition(q, k, v, causal_LL, Scores(0.5, sinks_H=sinks_H)))
    torch.testing.assert_close(blocks, computed(defined), rtol=1e-3, atol=1e-4)
