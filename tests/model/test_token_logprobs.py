"""Logprobs and entropies of tokens against the definition in float64, gradient included."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from shoal.model.token_logprobs import BLOCK_LOGITS, token_logprobs

VOCABULARY = 97
ROWS = 2 * (BLOCK_LOGITS // VOCABULARY) + 5
"""Two whole blocks and a part of one."""


def defined(logits_UV: Tensor, at_N: Tensor, token_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_UV = (logits_UV / temperature).log_softmax(-1)
    return logp_UV[at_N, token_N], -(logp_UV.exp() * logp_UV).sum(-1)


def losses(logp_N: Tensor, entropy_U: Tensor, bonus: float) -> Tensor:
    weight_N = torch.linspace(-1, 2, len(logp_N), dtype=logp_N.dtype)
    weight_U = torch.linspace(-bonus, 2 * bonus, len(entropy_U), dtype=entropy_U.dtype)
    return (weight_N * logp_N).sum() + (weight_U * entropy_U).sum()


@pytest.mark.parametrize("bonus", [0.0, 0.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_definition(temperature: float, bonus: float) -> None:
    torch.manual_seed(0)
    logits_UV = torch.randn(ROWS, VOCABULARY) * 3
    at_N = torch.randint(0, ROWS, (ROWS,))  # rows that predict no token, one, and several
    token_N = torch.randint(0, 4, (ROWS,))  # some of them the same token
    exact_UV = logits_UV.double().requires_grad_()
    wanted = defined(exact_UV, at_N, token_N, temperature)
    losses(*wanted, bonus).backward()
    logits_UV.requires_grad_()
    entropy: Literal["value", "gradient"] = "gradient" if bonus else "value"
    found = token_logprobs(logits_UV, at_N, token_N, temperature=temperature, entropy=entropy)
    losses(*found, bonus).backward()
    for got, want in zip((*found, logits_UV.grad), (*wanted, exact_UV.grad), strict=True):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("entropy", [None, "value", "gradient"])
def test_a_nearly_certain_token_keeps_its_gradient_in_bfloat16(entropy: Literal["value", "gradient"] | None) -> None:
    """1 - p is 0.0007 there; bfloat16 rounds p itself to 1."""
    logits_UV = torch.tensor([[9.0, 1.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    p = logits_UV.detach().double().softmax(-1)
    at_N = token_N = torch.zeros(1, dtype=torch.long)
    logp_N, _ = token_logprobs(logits_UV, at_N, token_N, entropy=entropy)
    logp_N.sum().backward()
    assert logits_UV.grad is not None
    torch.testing.assert_close(logits_UV.grad.double()[0, 0], 1 - p[0, 0], rtol=0.01, atol=0.0)


def test_a_second_gradient_of_the_same_logits_is_refused() -> None:
    logits_UV = torch.randn(3, 5, requires_grad=True)
    logp_N, _ = token_logprobs(logits_UV, torch.tensor([2]), torch.tensor([1]))
    logp_N.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp_N.sum().backward()


def test_the_entropy_is_left_out_unless_asked_for() -> None:
    logits_UV = torch.randn(3, 5)
    before = logits_UV.clone()
    logp_N, entropy_U = token_logprobs(logits_UV, torch.tensor([2]), torch.tensor([1]), entropy=None)
    torch.testing.assert_close(logp_N, logits_UV.log_softmax(-1)[[2], [1]])
    assert not entropy_U.any()
    assert torch.equal(logits_UV, before), "without a gradient the logits stay"
