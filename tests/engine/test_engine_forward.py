"""The forward that calls no modules, against transformers' own."""

from pathlib import Path

import pytest
import torch

from engine_models import plain, saved
from shoal.engine.compute.forward import DirectForward, ModuleForward, forward_of
from shoal.model.loading import load_model
from shoal.model.packed import PackedRows
from shoal.model.prefix_tree import prefix_tree

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {"num_key_value_heads": 2, "attention_bias": False, "head_dim": 16}),
        ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": YARN}),
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": 9}),
        ("Qwen2", WINDOWS),
        ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    ],
)
def test_the_direct_forward_gives_the_logits_of_transformers(
    kind: str, settings: dict[str, object], tmp_path: Path
) -> None:
    path = saved(kind, tmp_path, **settings)
    model, longest = load_model(path), 120
    forward = forward_of(model, longest)
    assert isinstance(forward, DirectForward)
    token_1L = torch.arange(longest)[None] * 7 % 97
    keep_K = torch.tensor([0, 5, 80, longest - 2])
    layout = PackedRows(prefix_tree([[*token_1L[0].tolist(), 0]]))
    with torch.inference_mode():
        expected_LV = plain(path)(token_1L).logits[0]
        logits_KV = forward(token_1L[0], torch.arange(longest), layout, keep_K)
    assert torch.allclose(logits_KV, expected_LV[keep_K], atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Gemma", {"head_dim": 16, "num_key_value_heads": 2}),
        ("Llama", {"hidden_act": "gelu"}),
        ("Llama", {"mlp_bias": True}),
        ("Llama", {"rope_parameters": DYNAMIC}),
    ],
)
def test_what_it_does_not_know_goes_through_the_modules(kind: str, settings: dict[str, object], tmp_path: Path) -> None:
    assert not isinstance(forward_of(load_model(saved(kind, tmp_path, **settings)), 64), DirectForward)


def test_in_bfloat16_it_is_as_near_to_float32_as_the_modules_are(tmp_path: Path) -> None:
    path = saved("Qwen3", tmp_path, num_key_value_heads=2, head_dim=16)
    token_L, at_L = torch.arange(90) * 7 % 97, torch.arange(90)
    layout = PackedRows(prefix_tree([[*token_L.tolist(), 0]]))
    with torch.inference_mode():
        exact_LV = plain(path)(token_L[None]).logits[0]
        model = load_model(path, dtype="bfloat16")
        modules = (ModuleForward(model)(token_L, at_L, layout, None) - exact_LV).abs().mean()
        direct = (DirectForward(model, 90)(token_L, at_L, layout, None) - exact_LV).abs().mean()
    assert direct < 1.2 * modules
