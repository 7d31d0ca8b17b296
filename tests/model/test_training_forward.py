"""The training forward by hand, against transformers' modules: values, gradients, and what an update changes."""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from engine_models import saved
from shoal.model import family
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs, packed_outputs
from shoal.model.training_forward import TrainingForward

ROWS = ((5, 6, 7, 8, 9, 3), (5, 6, 7, 20, 21), (5, 6, 7, 20, 22, 23, 24, 25), (9, 8))
TOKENS = torch.tensor([token for row in ROWS for token in row])
LENGTHS = [len(row) for row in ROWS]
AT = torch.tensor([i for i in range(len(TOKENS)) if i not in accumulate(LENGTHS, initial=0)])
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "Llama, tied": ("Llama", {"num_key_value_heads": 2, "attention_bias": False, "tie_word_embeddings": True}),
    "Mistral, with a window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 3}),
    "Qwen2, with biases": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "Qwen3, with norms of heads": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
}


def gradients(
    model: PreTrainedModel, forward: PreTrainedModel | TrainingForward, batches: int = 1
) -> dict[str, Tensor]:
    """Gradients of a loss of logprobs and entropies, added up over some micro-batches."""
    model.zero_grad()
    for batch in range(1, batches + 1):
        outputs = packed_outputs(forward, TOKENS, LENGTHS, at=AT, temperature=0.7, entropy="gradient", few_positions=0)
        assert outputs.entropy_N is not None
        weight_N = torch.linspace(-batch, 2, len(AT))
        (weight_N * outputs.logp_N + 0.1 * outputs.entropy_N).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


AS_LARGE: dict[str, int] = {"small": 0, "block": 300}
"""Sizes by which a small model is computed as a large one."""
both_sizes = pytest.mark.parametrize("sizes", [{}, AS_LARGE], ids=["as they are", "as large ones"])


@both_sizes
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_modules(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    path = saved(name, tmp_path, **settings)
    modules, model = load_model(path), load_model(path)
    assert family.is_known(model)
    forward = TrainingForward(model, torch.float32, **sizes)
    torch.testing.assert_close(
        packed_logprobs(forward, TOKENS, LENGTHS), packed_logprobs(modules, TOKENS, LENGTHS), rtol=1e-4, atol=1e-5
    )
    wanted, found = gradients(modules, modules, 2), gradients(model, forward, 2)
    assert found.keys() == wanted.keys()
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-3, atol=2e-5, msg=parameter)


@both_sizes
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_gradients_are_as_near_to_those_in_float32_as_autocast_has_them(
    kind: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    name, settings = KINDS[kind]
    path = saved(name, tmp_path, **settings)
    exact, modules, model = (load_model(path) for _ in range(3))
    wanted = gradients(exact, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = gradients(modules, modules)
    found = gradients(model, TrainingForward(model, torch.bfloat16, **sizes))
    assert all(gradient.dtype == torch.float32 for gradient in found.values())

    def distance(one: dict[str, Tensor]) -> float:
        squares = [(one[name] - wanted[name]).square().sum() for name in wanted]
        return float(torch.stack(squares).sum().sqrt())

    assert distance(found) < 1.5 * distance(usual)


def test_a_layer_keeps_what_norms_and_gates_are_computed_of_but_not_their_results(tmp_path: Path) -> None:
    model = load_model(saved("Llama", tmp_path, num_key_value_heads=2, attention_bias=False))
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_logprobs(TrainingForward(model, torch.float32), TOKENS, LENGTHS)
    widths = Counter(one.shape[-1] for one in kept.values())
    layers, width, feed_forward = 2, model.config.hidden_size, model.config.intermediate_size
    assert widths[2 * feed_forward] == layers  # gates and ups
    assert widths[feed_forward] == 0  # their products
    assert widths[width] == 3 * layers + 2  # the stream before each norm, and what attention and the last norm gave


class Made(TorchDispatchMode):
    """Keeps every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        return result


def test_gradients_have_their_memory_before_the_backward_pass(tmp_path: Path) -> None:
    model = load_model(saved("Qwen3", tmp_path, num_key_value_heads=2, tie_word_embeddings=False))
    forward = TrainingForward(model, torch.bfloat16, **AS_LARGE)
    with Made() as made:
        packed_logprobs(forward, TOKENS, LENGTHS)  # its gradient is never computed
    wanted = gradients(model, TrainingForward(model, torch.bfloat16, **AS_LARGE))
    found = gradients(model, forward)
    before = {one.data_ptr() for one in made.tensors}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], wanted[name])
        if "_proj" in name or "lm_head" in name:
            assert parameter.grad.data_ptr() in before, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_parameters_are_taken_up(dtype: torch.dtype, tmp_path: Path) -> None:
    path = saved("Qwen2", tmp_path, num_key_value_heads=2)
    model = load_model(path)
    forward = TrainingForward(model, dtype)
    before_T = packed_logprobs(forward, TOKENS, LENGTHS).detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    gradients(model, forward)
    optimizer.step()
    forward.lay_out()
    after_T = packed_logprobs(forward, TOKENS, LENGTHS).detach()
    other = load_model(path)
    other.load_state_dict(model.state_dict())
    anew_T = packed_logprobs(TrainingForward(other, dtype), TOKENS, LENGTHS).detach()
    assert not torch.allclose(before_T, after_T, atol=1e-2)
    torch.testing.assert_close(after_T, anew_T)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), load_model(path).parameters(), strict=True):
            parameter.copy_(old)
    forward.lay_out()
    torch.testing.assert_close(packed_logprobs(forward, TOKENS, LENGTHS).detach(), before_T)


def test_a_frozen_model_gets_no_gradient(tmp_path: Path) -> None:
    model = load_model(saved("Qwen3", tmp_path, num_key_value_heads=2)).requires_grad_(False)
    outputs = packed_outputs(TrainingForward(model, torch.float32), TOKENS, LENGTHS, at=AT)
    assert not outputs.logp_N.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
