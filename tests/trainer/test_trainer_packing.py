"""Packing keeps every row, once, under the budget."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.model import UNKNOWN
from shoal.trainer.packing import (
    even_bins,
    even_slices,
    first_fit,
    micro_batch,
    micro_batches,
    mixed,
    tokens_per_microbatch,
)
from shoal.types import Sample


def row(prompt: tuple[int, ...], answer: int) -> Sample:
    """A row that draws token 7 `answer` times."""
    p = len(prompt)
    return Sample(
        tokens=prompt + (7,) * answer,
        mask=(0,) * p + (1,) * answer,
        logprobs=(0.0,) * p + (-1.0,) * answer,
        versions=(-1,) * p + (0,) * answer,
        advantages=(0.0,) * p + (1.0,) * answer,
    )


row_lists = st.lists(
    st.builds(row, st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple), st.integers(1, 30)), max_size=30
)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_first_fit_holds_everything_once_within_the_budget(sizes: list[int], budget: int) -> None:
    bins = first_fit(sizes, budget)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(sizes)))
    assert all(len(bin_) <= 1 or sum(sizes[i] for i in bin_) <= budget for bin_ in bins)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_even_bins_hold_everything_once_and_differ_by_one_thing_at_most(sizes: list[int], count: int) -> None:
    bins = even_bins(sizes, count)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in bin_) for bin_ in bins]
    assert max(filled) - min(filled) <= max(sizes)


@given(row_lists, st.integers(1, 80), st.integers(1, 4))
def test_micro_batches_hold_every_row_once_within_the_budget_and_as_many_for_each_rank(
    rows: list[Sample], budget: int, ranks: int
) -> None:
    batches = micro_batches(rows, budget, ranks)
    assert len(batches) % ranks == 0
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        prompts = {rows[i].tokens[: rows[i].mask.index(1)] for i in batch}
        tokens = sum(map(len, prompts)) + sum(sum(rows[i].mask) for i in batch)
        assert len(batch) == 1 or tokens <= budget


def test_ranks_get_more_micro_batches_when_evenly_filled_ones_would_be_over_the_budget() -> None:
    rows = [row((prompt,), answer) for prompt, answer in enumerate((2, 2, 1, 1, 1))]
    assert len(micro_batches(rows, budget_tokens=6)) == 2  # 3 + 3 and 2 + 2 + 2 tokens
    batches = micro_batches(rows, budget_tokens=6, ranks=2)  # two even ones: 3 + 2 + 2 and 3 + 2
    assert len(batches) == 4
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]


def test_rows_of_one_prompt_share_a_micro_batch() -> None:
    rows = [row((prompt, prompt), 5) for _ in range(4) for prompt in (1, 2, 3)]
    batches = micro_batches(rows, budget_tokens=25)
    assert sorted(sorted(batch) for batch in batches) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_the_default_budget_falls_with_vocabulary_and_width_except_on_a_gpu() -> None:
    sizes = [(102, 1024), (49_152, 17_280), (151_936, 17_280)]
    assert [tokens_per_microbatch(*size, on_gpu=False) for size in sizes] == [4096, 1024, 441]
    assert {tokens_per_microbatch(*size, on_gpu=True) for size in sizes} == {16_384}


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        first_fit([1], 0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_slices_differ_by_one_at_most(count: int, parts: int) -> None:
    slices = even_slices(count, parts)
    assert [i for part in slices for i in part] == list(range(count))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
def test_peers_groups_are_spread_evenly_over_all_updates(parts: int, own_each: int, external: int) -> None:
    order = mixed([*"o" * parts * own_each, *"E" * external], str.isupper, parts)
    for part in even_slices(len(order), parts):
        update = [order[i] for i in part]
        assert update.count("o") == own_each
        assert external // parts <= update.count("E") <= external // parts + 1
    assert mixed(range(6), lambda _: False, 2) == list(range(6))  # alone nothing is moved


def test_experts_of_last_tokens_and_of_rows_without_any_are_unknown() -> None:
    recorded = replace(row((1, 2), 1), routing=bytes([3, 4, 5, 6]))
    batch = micro_batch([recorded, row((1,), 1)], [1.0, 1.0], "cpu")
    assert batch.routing_TB is not None
    assert batch.routing_TB.tolist() == [[3, 4], [5, 6], *[[UNKNOWN, UNKNOWN]] * 3]
    assert micro_batch([row((1,), 1)], [1.0], "cpu").routing_TB is None
