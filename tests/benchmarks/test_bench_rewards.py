"""The shortened run of `shoal bench rewards`."""

import pytest

from benchmarks import run_bench
from benchmarks.hostile.corpus import CASES


def test_what_a_score_costs_and_that_hostile_programs_are_contained():
    report = run_bench("rewards", quick=True)
    assert report["escaped"] == []
    assert report["contained_share"] == 1
    assert 5 <= report["hostile"] < len(CASES)
    for name in ("sandbox_p50_ms", "unit_tests_per_s", "math_per_s", "math_plain_per_s"):
        assert report[name] > 0
    difference_s = 1 / report["math_per_s"] - 1 / report["math_plain_per_s"]  # below zero when the machine is busy
    assert report["overhead_us"] == pytest.approx(1e6 * difference_s)
