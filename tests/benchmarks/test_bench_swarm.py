"""The shortened run of `shoal bench swarm`."""

from importlib import import_module

import pytest

from benchmarks import MODULES, run_bench


def test_offers_come_in_fast_and_simulated_nodes_take_from_one_another() -> None:
    report = run_bench("swarm", quick=True)
    assert report["simulated_nodes"] == 50
    assert int(str(report["simulated_groups"])) > 0
    assert 7000 < float(str(report["frame_bytes"])) < 10_000
    assert float(str(report["offers_per_s"])) > 0
    assert float(str(report["with_receipt_per_s"])) > 0


@pytest.mark.parametrize("name", MODULES)
def test_each_benchmark_that_has_a_name_can_be_called(name: str) -> None:
    assert callable(import_module(f"benchmarks.{MODULES[name]}").measure)
