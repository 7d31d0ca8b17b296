"""`shoal bench sealing`: its keys."""

from benchmarks.sealing import QUICK_BYTES, measure


def test_the_bench_of_a_sealed_version_has_its_keys() -> None:
    report = measure(quick=True)
    assert report["bytes"] == QUICK_BYTES
    assert report.keys() == {"bytes", "publish_wait_s", "seal_s", "one_thread_per_s"}
