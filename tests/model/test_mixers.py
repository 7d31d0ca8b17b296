"""Recurrences, convolutions, and attention that is capped, chunked or indexed: in training and in the engine."""

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine_models import plain, saved
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.compute.weight_loading import StagedWeights
from shoal.model.loading import load_model
from shoal.model.mixers import mixers_of
from shoal.model.packed import packed_logprobs
from shoal.model.tensor_files import TensorFiles
from shoal.trainer.ranks import ALONE
from shoal.trainer.sharded_start import loaded
from shoal.types import Sampling

BOTH = {"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}
INDEXED = {**LATENT, "index_topk": 3, "index_n_heads": 16, "index_head_dim": 16}
FAMILIES: dict[str, dict[str, object]] = {
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "Llama4Text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_chunk_size": 4,
        "no_rope_layers": [1, 0],
        "floor_scale": 3,
        "num_local_experts": 4,
    },
    "StableLm": {"num_key_value_heads": 2},
    "Qwen3Next": {**BOTH, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "Mamba": {"state_size": 8},
    "Jamba": {"num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "MiniMax": {**BOTH, "head_dim": 8, "block_size": 4, "num_local_experts": 4},
    "Zamba": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
    },
    "NemotronH": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "time_step_min": 0.6,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1},
    },
    "DeepseekV32": INDEXED,
    "GlmMoeDsa": {**INDEXED, "indexer_types": ["full", "shared"]},
}
"""One model of each family, in which every kind of layer of the family has more tokens than it sees or keeps."""
ROWS = ([5, 6, 7, 8, 9, 3, 4, 11, 12, 13], [5, 6, 7, 20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46], [9, 8])


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = str(request.param)
    return saved(kind, tmp_path_factory.mktemp(kind), **FAMILIES[kind])


def of_alone(theirs: PreTrainedModel, row: list[int]) -> torch.Tensor:
    """Logprobs [L - 1] of a row's tokens but the first."""
    logp_LV = theirs(torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)
    return logp_LV[range(len(row) - 1), row[1:]]


def test_rows_side_by_side_have_the_logprobs_and_gradients_of_each_row_alone(path: Path) -> None:
    theirs, ours = plain(path), load_model(path)
    lengths = [len(row) for row in ROWS]
    logp_T = packed_logprobs(ours, torch.tensor([token for row in ROWS for token in row]), lengths)
    logp_T.sum().backward()
    alone = [of_alone(theirs, row) for row in ROWS]
    for found, wanted in zip(logp_T.split(lengths), alone, strict=True):
        torch.testing.assert_close(found[1:], wanted, rtol=0, atol=1e-4)
    torch.cat(alone).sum().backward()
    wanted_grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        grad, wanted = parameter.grad, wanted_grads[name]
        if grad is None or wanted is None:  # no token went to this expert
            assert grad is wanted or not (wanted if grad is None else grad).any()
            continue
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(grad / scale, wanted / scale, rtol=0, atol=1e-5)


def test_answers_that_are_shared_read_in_parts_interrupted_and_continued_are_those_of_each_row_alone(
    path: Path,
) -> None:
    engine, theirs = StepEngine(load_model(path), EngineLimits(64, max_running=5, chunk_tokens=11)), plain(path)
    generator = random.Random(0)
    prompts = [[generator.randrange(4, 97) for _ in range(length)] for length in (17, 1, 26, 9)]
    requests = [Request(prompt, Sampling(10, seed=1), n=2) for prompt in prompts]
    for request in requests:
        engine.submit(request)
        engine.step()
    engine.update(StagedWeights(1, "", {}))
    finish(engine)
    first = requests[0].drafts[0]
    turn = Request([*first.prompt_ids, *first.sampled, 7, 8, 9], Sampling(10, seed=2), n=3)
    engine.submit(turn)
    finish(engine)
    assert engine.interruptions == 1
    assert engine.prefix_tokens_reused > len(first.prompt_ids)
    with torch.no_grad():
        for draft in (draft for request in (*requests, turn) for draft in request.drafts):
            wanted = of_alone(theirs, [*draft.prompt_ids, *draft.sampled])[draft.prompt_len - 1 :]
            torch.testing.assert_close(torch.tensor(draft.logprobs), wanted, rtol=0, atol=1e-4)


def test_a_bound_of_steps_holds_after_what_an_adapter_adds(tmp_path: Path) -> None:
    path = saved("NemotronH", tmp_path, **FAMILIES["NemotronH"])
    ours, theirs = load_model(path), plain(path)
    for model in (ours, theirs):
        for name, module in model.named_modules():
            if name.endswith("in_proj"):
                module.register_forward_hook(lambda _, __, projected: projected - 1.0)
    engine, request = StepEngine(ours, EngineLimits(64)), Request([5, 6, 7, 8, 9], Sampling(10, seed=1))
    engine.submit(request)
    finish(engine)
    (draft,) = request.drafts
    with torch.no_grad():
        wanted = of_alone(theirs, [*draft.prompt_ids, *draft.sampled])[draft.prompt_len - 1 :]
    torch.testing.assert_close(torch.tensor(draft.logprobs), wanted, rtol=0, atol=1e-4)


def test_weights_that_come_after_the_model_was_made_bound_the_steps(tmp_path: Path) -> None:
    """As where each rank makes an empty model, and fills in what it needs."""
    path = saved("NemotronH", tmp_path, **FAMILIES["NemotronH"])
    ours = loaded(path, ALONE, "cpu", files=TensorFiles(path))
    row = ROWS[0]
    with torch.no_grad():
        logp_T = packed_logprobs(ours, torch.tensor(row), [len(row)])
        torch.testing.assert_close(logp_T[1:], of_alone(plain(path), row), rtol=0, atol=1e-4)


def finish(engine: StepEngine) -> None:
    while not engine.idle:
        engine.step()


def test_a_state_is_kept_for_running_sequences_only(tmp_path: Path) -> None:
    engine = StepEngine(load_model(saved("Mamba", tmp_path, **FAMILIES["Mamba"])), EngineLimits(64, max_running=3))
    states = engine._cache.states
    for length in (5, 9, 5, 3):
        engine.submit(Request(list(range(4, 4 + length)), Sampling(length), n=2))
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(states))
    assert most == 3
    assert len(states) == 0
    assert len(mixers_of(engine.model)) == 2
