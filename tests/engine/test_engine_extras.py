"""What the local engine tells beside tokens and their logprobs, against plain forwards of the same model."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chat_templates import STYLES, tokenizer
from engine_models import plain, saved
from shoal.engine.compute.logit_rules import (
    LEAST_SHARE,
    MOST_GRAMMAR,
    Grammars,
    RuledLogits,
    _allowed,
    compiling_thread,
)
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request, scoring
from shoal.engine.compute.step_engine import StepEngine
from shoal.errors import RequestRefused
from shoal.interfaces import LogitRules
from shoal.model.loading import load_model
from shoal.model.routing import Routing
from shoal.types import Sampling

PROMPT = tuple(range(20, 60))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("Qwen2", tmp_path_factory.mktemp("dense"), num_key_value_heads=2)


def answered(path: Path, *requests: Request, records_routing: bool = False) -> None:
    """Has an engine that computes prompts in three chunks answer the requests."""
    limits = EngineLimits(max_model_len=160, max_running=4, chunk_tokens=16)
    engine = StepEngine(load_model(path), limits, records_routing=records_routing)
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()


@torch.inference_mode()
def logprobs(path: Path, tokens: tuple[int, ...]) -> Tensor:
    """Logprobs [L - 1, V] of what follows each token but the last."""
    return plain(path)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def test_the_most_likely_tokens_and_listed_ones_are_scored_in_place_of_each_token(dense: Path) -> None:
    listed = [[i % 7, 90] for i in range(len(PROMPT) - 1)]
    best, of_list = scoring(PROMPT, 3), scoring(PROMPT, listed)
    answered(dense, best, of_list)
    logp_LV = logprobs(dense, PROMPT)
    for found, logp_V in zip(best.drafts[0].ranked, logp_LV, strict=True):
        values, ids = logp_V.topk(3)
        assert [i for i, _ in found] == ids.tolist()
        assert [logp for _, logp in found] == pytest.approx(values.tolist(), abs=1e-4)
    for found, ids, logp_V in zip(of_list.drafts[0].ranked, listed, logp_LV, strict=True):
        assert found == [(i, pytest.approx(float(logp_V[i]), abs=1e-4)) for i in ids]


def test_rules_choose_the_token_and_its_logprob_stays_the_model_s(dense: Path) -> None:
    """A row without rules beside it is not changed by them."""
    bias = LogitRules(top=2, presence_penalty=1.5, frequency_penalty=0.5, bias=((33, 6.0),))
    ruled = Request(PROMPT, Sampling(12, temperature=0), rules=RuledLogits(bias))
    free, alone = (Request(PROMPT, Sampling(12, temperature=0)) for _ in range(2))
    answered(dense, ruled, free)
    answered(dense, alone)
    assert free.drafts[0].sampled == alone.drafts[0].sampled
    (draft,) = ruled.drafts
    answer = tuple(draft.sampled)
    for place, logp_V in enumerate(logprobs(dense, PROMPT + answer)[len(PROMPT) - 1 :]):
        left_V = logp_V.clone()
        left_V[33] += 6.0
        for token in set(answer[:place]):
            left_V[token] -= 1.5 + 0.5 * answer[:place].count(token)
        assert answer[place] == int(left_V.argmax())
        assert draft.logprobs[place] == pytest.approx(float(logp_V[answer[place]]), abs=1e-4)
        assert [token for token, _ in draft.tops[place]] == logp_V.topk(2).indices.tolist()


def test_a_trained_row_logs_the_logprob_after_its_grammar_and_which_tokens_were_forced(
    tmp_path: Path,
) -> None:
    made = tokenizer(STYLES["qwen2.5"])
    dense = saved("Qwen2", tmp_path, vocabulary=len(made), num_key_value_heads=2)
    made.save_pretrained(tmp_path)
    stop = made.convert_tokens_to_ids("<|im_end|>")
    matcher = Grammars(tmp_path, len(made)).matcher('start: /[^c]+/ "c"', [stop])
    rules = RuledLogits(LogitRules(), matcher.deep_copy(), is_trained=True)
    request = Request(PROMPT, Sampling(12, seed=3, stop_token_ids=(stop,)), rules=rules)
    answered(dense, request)
    (draft,) = request.drafts
    answer = tuple(draft.sampled)
    for place, logp_V in enumerate(logprobs(dense, PROMPT + answer)[len(PROMPT) - 1 :]):
        allowed_V = _allowed(matcher, logp_V)
        share = float(logp_V.exp()[allowed_V].sum())
        assert draft.logprobs[place] == pytest.approx(float(logp_V[answer[place]]) - math.log(share), abs=1e-3)
        assert (place in draft.forced) == (share < LEAST_SHARE)
        matcher.consume_token(answer[place])
    assert 0 < len(draft.forced) <= len(answer)


@torch.inference_mode()
def test_the_experts_of_every_token_but_the_last_are_recorded(tmp_path: Path) -> None:
    """Answers to the same prompt share its tokens, which are computed once."""
    settings = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    path = saved("Qwen3Moe", tmp_path, num_key_value_heads=2, **settings)
    request = Request(PROMPT, Sampling(9, seed=1), n=2)
    answered(path, request, records_routing=True)
    model = plain(path)
    routing = Routing(model)
    for draft in request.drafts:
        model(torch.tensor([[*PROMPT, *draft.sampled]]))
        assert draft.recorded_routing() == routing.found()[:-1].numpy().tobytes()


REFERENCE: dict[str, object] = {"$ref": "#/$defs/NEXT"}
PARTS = [REFERENCE, {"items": REFERENCE}, {"properties": {"a": REFERENCE}, "required": ["a"]}]


@pytest.mark.parametrize("part", PARTS)
def test_no_schema_of_a_client_ends_the_process_that_compiles_it(tmp_path: Path, part: dict[str, object]) -> None:
    """llguidance descends by recursion, and a schema whose parts refer to each other is as deep as it is long."""
    tokenizer(STYLES["qwen2.5"]).save_pretrained(tmp_path)
    grammars, text = Grammars(tmp_path, 300), json.dumps(part, separators=(",", ":"))

    def grammar(parts: int) -> str:
        chain = ",".join(f'"{i:x}":{text.replace("NEXT", f"{i + 1:x}")}' for i in range(parts))
        return f'start: %json {{"$ref":"#/$defs/0","$defs":{{{chain},"{parts:x}":{{}}}}}}'

    longest = max(parts for parts in range(0, 1200, 10) if len(grammar(parts)) <= MOST_GRAMMAR)
    with compiling_thread() as thread:
        assert thread.submit(grammars.matcher, grammar(longest), [1]).result()
        with pytest.raises(RequestRefused, match="expected schemas of at most"):
            thread.submit(grammars.matcher, grammar(3000), [1]).result()
