"""The shortened form of `make cluster`: Ray on hosts that share nothing, of which one joins and one dies."""

import os
import re

import pytest

from benchmarks.cluster import RANKS, SHORT, on_hosts
from benchmarks.hosts import can_isolate
from shoal.run.demo_model.warm_start import demo_model


@pytest.mark.timeout(900)
def test_a_run_on_hosts_that_share_nothing_outlives_the_host_of_a_rank_and_lost_roles_are_said() -> None:
    if not can_isolate():
        pytest.skip(f"needs root, for network and mount namespaces of its hosts; this is user {os.getuid()}")
    demo_model()
    report = on_hosts(SHORT)
    assert report["isolated"]
    assert (report["nodes"], report["engines"], report["ranks"]) == (SHORT.hosts, SHORT.engines, RANKS)
    assert report["killed"] == ["a node with a rank"]
    assert isinstance(report["recovered_s"], dict)
    assert report["recovered_s"]["rank"] > 0
    assert (report["lost"], report["doubled"], report["audit"]) == (0, 0, True)
    assert isinstance(report["said"], list)
    engine, rewards = (
        [one for one in report["said"] if one.startswith(name)] for name in ("ray-engine-0", "ray-rewards-0")
    )
    waits = "waits for a node with room; the Ray cluster has .+ free"
    assert engine
    assert all(re.fullmatch(rf"ray-engine-0 {waits}", one) for one in engine), engine
    wanted = r"ray-rewards-0 is given up: it ended 2 times within 600 s; the last time "
    wanted += r"(its command ended with code 2|Ray said: .+); "  # it may have been on the host that was killed
    assert re.fullmatch(wanted + r"see \S+/doomed/ray-rewards-0\.log", rewards.pop()), report["said"]
    assert all(re.fullmatch(rf"ray-rewards-0 {waits}", one) for one in rewards), rewards  # the run took what there was
