"""The shortened run of `shoal bench swarm`."""

from importlib import import_module

import pytest

from benchmarks import MODULES, run_bench


def test_offers_come_in_fast_and_simulated_nodes_take_from_one_another() -> None:
    report = run_bench("swarm", quick=True)
    sizes = report["simulated"]
    assert isinstance(sizes, list)
    assert [one["nodes"] for one in sizes] == [100, 300]
    assert all(one["groups"] > 0 for one in sizes)
    # A node receives all frames, to find those of known authors in a flood. Its work does not grow with the swarm: it
    # reads as many frames of others, however many there are.
    assert sizes[1]["bytes_per_step"] < 1.1 * 3 * sizes[0]["bytes_per_step"]
    assert sizes[1]["calls"] < 1.3 * sizes[0]["calls"]
    assert report["nodes"] == 300
    assert float(str(report["cpu_s_per_node_hour"])) > 0
    assert float(str(report["growth_exponent"])) < 1.3  # 1 is linear
    assert 0 <= float(str(report["quadratic_share"])) <= 1
    assert 7000 < float(str(report["frame_bytes"])) < 10_000
    assert float(str(report["offers_per_s"])) > 0
    assert float(str(report["with_receipt_per_s"])) > 0


@pytest.mark.parametrize("name", MODULES)
def test_each_benchmark_that_has_a_name_can_be_called(name: str) -> None:
    assert callable(import_module(f"benchmarks.{MODULES[name]}").measure)
