"""Packed rows with shared beginnings against transformers' own forward, row by row."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from shoal.model import packed
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs, packed_outputs
from shoal.model.prefix_tree import prefix_tree

# Few token ids, so that rows share beginnings, begin one another and are equal. Not the pad token: its embedding is
# zero, and the normalisation of a zero vector multiplies rounding errors of the gradient by a thousand.
row_lists = st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=9), min_size=1, max_size=7)


def own_logprobs(model: PreTrainedModel, row: Sequence[int], temperature: float) -> Tensor:
    """[L] by transformers' eager attention; 0 for the first token."""
    tokens = torch.tensor([row])
    logits = model(tokens).logits[0] / temperature
    logp = logits.log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logp])


@pytest.fixture(scope="module", params=["full", "window of 3"])
def models(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours, and the same weights as transformers runs them."""
    path = tiny_model_dir
    if request.param != "full":
        path = tmp_path_factory.mktemp("window")
        config = Qwen2Config.from_pretrained(
            tiny_model_dir, use_sliding_window=True, sliding_window=3, layer_types=["sliding_attention"] * 2
        )
        torch.manual_seed(1)
        Qwen2ForCausalLM(config).save_pretrained(path)
    return load_model(path), AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@settings(max_examples=40)
@given(rows=row_lists, temperature=st.sampled_from([1.0, 0.7]), few=st.sampled_from([0, packed.FEW_POSITIONS]))
def test_logprobs_and_gradients_equal_those_of_each_row_alone(
    models: tuple[PreTrainedModel, PreTrainedModel], rows: list[list[int]], temperature: float, few: int
) -> None:
    ours, theirs = models
    tokens_T = torch.tensor([token for row in rows for token in row])
    logp_T = packed_logprobs(ours, tokens_T, [len(row) for row in rows], temperature=temperature, few_positions=few)
    wanted_T = torch.cat([own_logprobs(theirs, row, temperature) for row in rows])
    torch.testing.assert_close(logp_T, wanted_T, rtol=1e-4, atol=1e-5)
    if not wanted_T.requires_grad or not logp_T.requires_grad:
        assert all(len(row) == 1 for row in rows)
        return
    weights_T = torch.linspace(-1, 1, len(tokens_T))
    for model, stream_T in ((ours, logp_T), (theirs, wanted_T)):
        model.zero_grad()
        (stream_T * weights_T).sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@given(row_lists)
def test_every_token_but_a_rows_last_is_the_node_that_spells_its_beginning(rows: list[list[int]]) -> None:
    tree = prefix_tree(rows)
    spelled = {}
    for path in tree.paths:
        for depth, node in enumerate(path.nodes):
            spelled[node] = [tree.tokens[n] for n in path.nodes[: depth + 1]]
            assert tree.positions[node] == depth
    expected = [[*row[: i + 1]] if i + 1 < len(row) else None for row in rows for i in range(len(row))]
    assert [None if node < 0 else spelled[node] for node in tree.node_of] == expected
    beginnings = {tuple(beginning) for beginning in expected if beginning is not None}
    assert len(tree.tokens) == len(beginnings) == len(spelled)
    assert sum(len(path.nodes) - path.shared for path in tree.paths) == len(tree.tokens)


def test_only_wanted_positions_are_returned_with_their_entropy(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir)
    tokens_T, lengths = torch.tensor([5, 6, 7, 5, 6, 8, 9]), [3, 4]
    at_N = torch.tensor([2, 5, 4])
    outputs = packed_outputs(model, tokens_T, lengths, at=at_N, entropy="value")
    entropy_N = outputs.entropy_N
    assert entropy_N is not None
    torch.testing.assert_close(outputs.logp_N, packed_logprobs(model, tokens_T, lengths)[at_N])
    # Both rows begin alike, so the tokens after that beginning were drawn from one distribution.
    assert entropy_N[0] == entropy_N[1]
    logits_V = torch.stack(
        [packed_logprobs(model, torch.tensor([5, 6, t]), [3])[2].detach() for t in range(model.config.vocab_size)]
    )
    torch.testing.assert_close(entropy_N[0], -(logits_V.exp() * logits_V).sum(), rtol=1e-4, atol=1e-5)
