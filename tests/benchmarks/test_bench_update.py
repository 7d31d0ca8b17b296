"""The benchmarks of packing and of the update, shortened: what they compare is the same work."""

import random

import pytest

from benchmarks import run_bench
from benchmarks.packing import padded_share
from benchmarks.rows import answer_lengths, row


def test_packed_and_padded_rows_give_the_same_gradient_and_packed_ones_compute_no_pads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = run_bench("packing", quick=True)
    assert "bench packing --quick begins" in capsys.readouterr().err
    assert report["gradient_difference"] < 1e-3
    assert report["useful_share"] >= 0.95
    assert report["padded_useful_share"] < report["attention_useful_share"] <= 1
    assert report["speedup"] > 0


def test_the_bare_side_computes_the_same_packed_tokens_as_the_step():
    report = run_bench("trainer", quick=True)
    shared_prompts = 2 * 7 * 16  # of each group's eight rows one computes the prompt
    assert report["computed_tokens"] == pytest.approx(report["tokens"] - report["rows"] - shared_prompts, abs=8)
    assert report["ratio"] > 0
    assert 4e6 < report["parameters"] < 5e6


def test_the_share_of_padding_is_that_of_rows_padded_to_the_longest():
    rows = [row((1,), (2,) * n, 1.0) for n in (1, 3, 7)]
    assert padded_share([rows]) == pytest.approx((2 + 4 + 8) / (3 * 8))
    assert padded_share([rows[:2], rows[2:]]) == pytest.approx((2 + 4 + 8) / (2 * 4 + 8))


def test_lengths_are_heavy_tailed():
    lengths = sorted(answer_lengths(random.Random(1), 4000))
    assert max(lengths) == 512
    assert lengths[2000] < 0.75 * sum(lengths) / len(lengths)
