"""Logprobs of every kind of model that is accepted, against transformers' eager attention; every other is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine_models import plain, saved
from shoal.errors import ModelError
from shoal.model.loading import ATTENTION, load_model
from shoal.model.packed import packed_logprobs

ROWS = ((5, 6, 7, 8, 9, 3, 4, 11, 12), (5, 6, 7, 20, 21), (40, 41, 42, 43, 44, 45, 46), (9, 8))
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_GEMMA_4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 3,
    "per_layer_config": {"1": {"head_dim": 16}, "2": {"head_dim": 16}},
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
"""Heads of two widths, and a layer with the keys and values of the one before it."""
COMPUTED = [
    ("Llama", {"num_key_value_heads": 2}),
    ("Qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, **WINDOWS}),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    ("Qwen3Moe", {"num_key_value_heads": 2, "head_dim": 8, **EXPERTS}),
    ("Gemma3Text", {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, **WINDOWS}),
    ("Gemma4Text", {"num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 1, **OF_GEMMA_4}),
    ("Mistral", {"num_key_value_heads": 2, "sliding_window": 3}),
    ("Phi", {}),
    ("Phi3", {"num_key_value_heads": 2}),
    ("GraniteMoe", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Olmo2", {"num_key_value_heads": 2}),
    ("SmolLM3", {"num_key_value_heads": 2}),
    ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ("Cohere", {"num_key_value_heads": 2}),
    ("GptOss", {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, **WINDOWS}),
]
REFUSED = [
    ("Doge", {"num_key_value_heads": 2}, "'attention_mask'"),
    ("Bloom", {"n_layer": 2, "n_head": 4}, "from transformers' own"),
    ("GPTJ", {"n_layer": 2, "n_head": 4, "rotary_dim": 4}, "cannot be replaced"),
]


@pytest.mark.parametrize(("kind", "settings"), COMPUTED, ids=[kind for kind, _ in COMPUTED])
def test_packed_rows_get_the_logprobs_of_transformers_own_attention(
    tmp_path: Path, kind: str, settings: dict[str, object]
) -> None:
    path = saved(kind, tmp_path, **settings)
    theirs, ours = plain(path), load_model(path)
    with torch.no_grad():
        tokens_T = torch.tensor([token for row in ROWS for token in row])
        logp_T = packed_logprobs(ours, tokens_T, [len(row) for row in ROWS])
        wanted_T = torch.cat([own_logprobs(theirs, torch.tensor(row)) for row in ROWS])
    torch.testing.assert_close(logp_T, wanted_T, rtol=0, atol=1e-4)
    assert ours.config._attn_implementation == ATTENTION


def own_logprobs(model: PreTrainedModel, row_L: torch.Tensor) -> torch.Tensor:
    """[L], 0 for the first token."""
    logits_LV = model(row_L[None], use_cache=False).logits[0]
    return torch.cat([torch.zeros(1), logits_LV.log_softmax(-1)[range(len(row_L) - 1), row_L[1:]]])


@pytest.mark.parametrize(("kind", "settings", "why"), REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_a_model_that_would_be_computed_otherwise_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        load_model(saved(kind, tmp_path, **settings))


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    path = saved("Llama", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its tensors, such as model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(path)


def test_a_checkpoint_of_quantised_weights_is_refused_by_the_name_of_the_method(tmp_path: Path) -> None:
    path = saved("Llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match="weights quantised by 'awq' cannot be trained: expected float32"):
        load_model(path)
