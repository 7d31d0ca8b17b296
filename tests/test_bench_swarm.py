"""The shortened run of `shoal bench swarm`."""

from shoal.bench import run_bench


def test_offers_come_in_fast_and_simulated_nodes_take_from_one_another() -> None:
    report = run_bench("swarm", quick=True)
    assert report["simulated_nodes"] == 50
    assert int(str(report["simulated_groups"])) > 0
    assert 7000 < float(str(report["frame_bytes"])) < 10_000
    assert float(str(report["offers_per_s"])) > 200
    assert float(str(report["with_receipt_per_s"])) > 50
