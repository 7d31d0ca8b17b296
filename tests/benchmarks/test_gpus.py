"""`make gpus`, shortened: two layers of one model on eight fake GPUs."""

from benchmarks.gpus import measure


def test_a_fake_step_takes_what_was_planned_and_reads_no_number() -> None:
    report = measure(quick=True)
    (config,) = report["configs"]  # type: ignore[misc]
    assert (report["starts"], report["syncs_in_hot_path"], config["fits"]) == (True, 0, True)
    assert abs(config["planned_gb"] / config["fake_gb"] - 1) < 0.1
